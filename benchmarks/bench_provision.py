"""`make bench-provision`: what the reconciler's look at 500 instances of three provisioners takes.

A third of the instances are engines of the supervisor (its files; no engine runs), a third registered endpoints, a
third jobs of a Ray cluster. Endpoints, Jobs REST and launchers are emulated on loopback by three processes, which take
part of the same cores. PostgreSQL, the provisioners and the reconciler are the product's own.

Last line: JSON with `observe_ms` and `observe_max_ms` (one look at all provisioners, median and largest; goal 100),
`observe_cpu_ms` (processor time of this process for one look and for reading the rows, mean), `memory_mb` (most that
this process held), `round_ms` (median of a whole round, with its transactions), `orders` of the first round and
`orders_per_s` (over that whole round, with its look), `all_ready_s`, and `stale_s` (from the moment when the cluster
hangs until its row says so, the largest). QUICK=1: 60 instances, ten looks, one hang.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from benchmarks.console.pages import servers
from benchmarks.servers.engines import prefer, stop_on_sigterm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=500)
    parser.add_argument("--looks", type=int, default=50)
    parser.add_argument("--freezes", type=int, default=3)
    args = parser.parse_args()
    if os.environ.get("QUICK", "") not in ("", "0"):
        args.instances, args.looks, args.freezes = 60, 10, 1
    stop_on_sigterm()
    prefer(os.getpid())
    with servers(), tempfile.TemporaryDirectory(prefix="slackline-provision-") as name:
        from django.core.management import call_command

        from benchmarks.provision.rounds import measure

        call_command("migrate", verbosity=0)
        print(json.dumps(measure(Path(name), args.instances, args.looks, args.freezes)))


if __name__ == "__main__":
    main()
