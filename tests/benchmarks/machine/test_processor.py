"""Processor time of a process is measured with its children, as a share of one core."""

import os
import subprocess
import sys

from benchmarks.machine.processor import ProcessorShare

BUSY = "import time; end = time.process_time() + {seconds}\nwhile time.process_time() < end: pass"


def test_a_process_with_a_busy_child_has_used_the_processor():
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY.format(seconds=0.4)!r}]); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as parent:
        share = ProcessorShare({"parent": parent.pid, "test": os.getpid()})
        while share.read()["parent"] == 0.0 and parent.poll() is None:
            pass
        busy = share.read()
        parent.communicate(b"\n")
    assert busy["parent"] > 0.0
    assert busy["test"] > 0.0  # the loop above, and the parent is its child
