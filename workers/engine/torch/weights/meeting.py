"""Connects two engines of a fleet for a weight transfer: each proves that it knows the fleet's token, then they form a
process group.

The receiver listens on a port for this transfer. Both sides greet as for KV (`workers.engine.kv.wire`) and exchange the
addresses that torch.distributed needs; no other program can read or change those. The connections that torch then makes
are authenticated again, since another program may have connected to the open port first. Nothing is encrypted: anyone
who can read the network between two engines can read the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import secrets
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import orjson
import torch
import torch.distributed as dist

from workers.engine.kv.unproven_connections import UnprovenConnections
from workers.engine.kv.wire import GREETING_S, KvTransferError, be_greeted, greet, read_frame, write_frame
from workers.engine.torch.weights.files import WeightsError
from workers.engine.torch.weights.host_group import HostGroup, device_identity
from workers.engine.torch.weights.pieces import longest_operation, patience
from workers.engine.weights.turns import LoadTurn
from workers.http.fleet_proof import address, keyed

SENDER, RECEIVER = 0, 1
PACED = "paced"  # key with which the sender says the size of its pieces, if it asks for turns
TURN = "turn"  # key with the number of the piece that the sender sends next, and its LoadTurn
DEVICE = "device"  # start of the keys with which both sides say their CUDA devices
LANDED = "landed"  # key with which the receiver confirms that all weights have arrived and are correct
# By default, when a peer dies, NCCL's watchdog ends the surviving process after waiting a minute for dumps.
ONLY_THE_TRANSFER_BREAKS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # abort the communicator and keep the process
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
Side = Literal["sends", "receives"]
_BROKEN = (KvTransferError, OSError, asyncio.IncompleteReadError)


class Meeting(dist.Store):
    """The key-value store that torch.distributed needs to form a group of two engines, over their connection. Torch's
    threads call it; the event loop reads and writes.

    `host`: address of this engine, on which all its connections for this transfer listen. `timeout_s`: to form a group.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, host: str, timeout_s: float
    ) -> None:
        super().__init__()
        self.host, self.limit = host, timedelta(seconds=timeout_s)
        self._secret = secret
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._known: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._alone = False
        self._heard = 0  # keys from the other engine
        self._reading = self._loop.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                said = await read_frame(reader)
                self._heard += 1
                self._learn(str(said["key"]), bytes.fromhex(said["value"]))
        except (*_BROKEN, KeyError, TypeError, ValueError):
            self._left()

    def _left(self) -> None:
        with self._changed:
            self._alone = True
            self._changed.notify_all()

    def _learn(self, key: str, value: bytes) -> None:
        with self._changed:
            self._known[key] = value
            self._changed.notify_all()

    async def close(self) -> None:
        self._reading.cancel()
        self._left()  # ends a thread that still moves weights
        self._writer.close()
        with contextlib.suppress(*_BROKEN):
            await self._writer.wait_closed()

    # ---- the interface of a store, called from torch's threads ---------------------------------------------------

    def set(self, key: str, value: bytes) -> None:
        self._learn(key, bytes(value))
        frame = {"key": key, "value": bytes(value).hex()}
        self._loop.call_soon_threadsafe(write_frame, self._writer, frame)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys. Raises RuntimeError, as other stores do."""
        seconds = (timeout or self.limit).total_seconds()
        with self._changed:
            self._changed.wait_for(lambda: self._alone or self.check(keys), seconds)
            if not self.check(keys):
                late = f"the other engine did not join within {seconds:g} s"
                raise RuntimeError("the other engine disconnected" if self._alone else late)

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._known for key in keys)

    def landed(self) -> None:
        """Called by the receiver: confirm that all weights have arrived."""
        self.set(LANDED, b"\x01")

    def wait_landed(self, nbytes: int) -> None:
        """Called by the sender: wait for the confirmation, at most as long as the last `nbytes` may take. Without it
        the sender would only know that everything was sent. Raises RuntimeError."""
        self.wait([LANDED], patience(nbytes))

    # ---- turns of the sender on a shared link ------------------------------------------------------------------------

    def paces(self, piece_bytes: int) -> None:
        """Called by the sender, before the group is formed: it will announce each piece."""
        self.set(PACED, str(piece_bytes).encode())

    @property
    def piece_bytes(self) -> int | None:
        """Of a sender that announces each piece; None: it does not. Known once the group is formed, since the keys of
        the sender come in order. Raises ValueError."""
        return int(self._known[PACED]) if PACED in self._known else None

    def tell_turn(self, number: int, turn: LoadTurn) -> None:
        """Called by the sender. Raises RuntimeError if the other engine disconnected."""
        if self._alone:
            raise RuntimeError("the other engine disconnected")
        self.set(TURN, orjson.dumps({"piece": number, **asdict(turn)}))

    def await_turn(self, number: int, turn: LoadTurn, within: timedelta) -> None:
        """Called by the receiver: wait until this piece is announced, while the sender says that it is held. `turn`
        gets what it says. Raises RuntimeError if it says nothing for as long as `within`, ValueError."""
        with self._changed:
            while not self._is_turn(number, turn):
                if self._alone:
                    raise RuntimeError("the other engine disconnected")
                heard, seconds = self._heard, within.total_seconds()
                if not self._changed.wait_for(lambda before=heard: self._alone or self._heard != before, seconds):  # type: ignore[misc]
                    raise RuntimeError(f"the source did not announce piece {number} within {seconds:g} s")

    def _is_turn(self, number: int, turn: LoadTurn) -> bool:
        if TURN not in self._known:
            return False
        said = orjson.loads(self._known[TURN])
        turn.flow, turn.held_s, turn.level = str(said["flow"])[:40], float(said["held_s"]), int(said["level"])
        return bool(said["piece"] >= number)

    @contextmanager
    def cutting(self, group: Any) -> Iterator[None]:
        """Context manager that aborts the group as soon as the other engine disconnects before the confirmation. NCCL
        would wait until its timeout. (Gloo notices a broken connection, but a wait that has begun ends only with its
        timeout.) Raises RuntimeError instead of the error that the abort causes in the block."""
        over, cut = threading.Event(), threading.Event()
        watching = threading.Thread(target=self._watch, args=(group, over, cut), daemon=True)
        watching.start()
        try:
            yield
        except Exception as error:
            if cut.is_set():
                raise RuntimeError("the other engine disconnected") from error
            raise
        finally:
            with self._changed:
                over.set()
                self._changed.notify_all()
            watching.join()  # it holds a reference to the group, which must end in the caller's thread

    def _watch(self, group: Any, over: threading.Event, cut: threading.Event) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._alone or over.is_set())
            if over.is_set() or self.check([LANDED]):
                return
            cut.set()
        group.abort()

    def clone(self) -> Meeting:
        """Called for NCCL's own threads."""
        return self

    # ---- the group -----------------------------------------------------------------------------------------------

    def group(self, rank: int, device: torch.device) -> Any:
        """The process group of both engines, after each has authenticated over it. Raises RuntimeError, WeightsError.

        The receiver authenticates first, so that the sender sends nothing to another program.
        """
        group = self._made(rank, device)
        try:
            if rank == RECEIVER:
                self._show(group, SENDER, "receives", device)
                self._see(group, SENDER, "sends", device)
            else:
                self._see(group, RECEIVER, "receives", device)
                self._show(group, RECEIVER, "sends", device)
        except BaseException:
            group.abort()
            raise
        return group

    def _made(self, rank: int, device: torch.device) -> Any:
        if device.type != "cuda":
            return self._gloo(rank, self.limit)
        if self._on_one_device(rank, device):
            return HostGroup(self._gloo(rank, longest_operation()))
        for name, value in ONLY_THE_TRANSFER_BREAKS.items():
            os.environ.setdefault(name, value)
        return dist.ProcessGroupNCCL(self, rank, 2, longest_operation())

    def _gloo(self, rank: int, limit: timedelta) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.host)]
        options._timeout = limit
        options._threads = 1
        return dist.ProcessGroupGloo(self, rank, 2, options)

    def _on_one_device(self, rank: int, device: torch.device) -> bool:
        """Whether both engines use the same CUDA device. Raises RuntimeError if the other one does not say."""
        own = device_identity(device).encode()
        self.set(f"{DEVICE}/{rank}", own)
        theirs = f"{DEVICE}/{SENDER if rank == RECEIVER else RECEIVER}"
        try:
            return self.get(theirs) == own
        except RuntimeError as error:
            if self._alone or not self._heard:
                raise
            raise RuntimeError("the other engine does not say its CUDA device: is it of an earlier version?") from error

    def _proof(self, side: Side) -> bytes:
        return hmac.new(self._secret, side.encode(), hashlib.sha256).digest()

    def _show(self, group: Any, peer: int, side: Side, device: torch.device) -> None:
        proof = torch.tensor(list(self._proof(side)), dtype=torch.uint8, device=device)
        group.send([proof], peer, 0).wait(patience(proof.nbytes))

    def _see(self, group: Any, peer: int, side: Side, device: torch.device) -> None:
        proof = torch.zeros(hashlib.sha256().digest_size, dtype=torch.uint8, device=device)
        group.recv([proof], peer, 0).wait(patience(proof.nbytes))
        if not hmac.compare_digest(bytes(proof.tolist()), self._proof(side)):
            raise WeightsError("another program joined the transfer: it does not know the fleet's token")


def _secret(token: str, nonce: str) -> bytes:
    return bytes.fromhex(keyed(token, "weights", nonce))


class OpenPort(NamedTuple):
    """A receiver's open port. `nonce`: of this transfer, sent to the source with the order."""

    port: int
    nonce: str
    came: asyncio.Future[Meeting]

    async def met(self, timeout_s: float) -> Meeting:
        """Wait until the source has connected. Raises WeightsError."""
        try:
            return await asyncio.wait_for(asyncio.shield(self.came), timeout_s)
        except TimeoutError:
            raise WeightsError(f"the source did not connect within {timeout_s:g} s") from None


@asynccontextmanager
async def awaited(host: str, token: str, timeout_s: float) -> AsyncIterator[OpenPort]:
    """Listen at `host` for the source: the first program that knows the token. Others are disconnected, and the wait
    continues. Raises WeightsError if this machine does not have the address."""
    nonce, unproven = secrets.token_hex(16), UnprovenConnections()
    came: asyncio.Future[Meeting] = asyncio.get_running_loop().create_future()

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        unproven.come(writer)
        try:
            port = writer.get_extra_info("sockname")[1]
            await be_greeted(reader, writer, token, {address(host, port)})
        except _BROKEN:  # TimeoutError is an OSError
            writer.close()
            return
        finally:
            unproven.go(writer)
        if came.done():
            writer.close()
        else:
            came.set_result(Meeting(reader, writer, _secret(token, nonce), host, timeout_s))

    try:
        server = await asyncio.start_server(welcome, host, 0)
    except OSError as error:
        raise WeightsError(f"cannot listen for weights at {host} (--advertise-host): {error}") from error
    try:
        yield OpenPort(server.sockets[0].getsockname()[1], nonce, came)
    finally:
        server.close()
        if not came.cancel():
            await came.result().close()


async def meet(host: str, port: int, nonce: str, token: str, own_host: str, timeout_s: float) -> Meeting:
    """Called by the source: connect to the receiver. Raises WeightsError."""
    writer = None
    try:
        async with asyncio.timeout(min(GREETING_S, timeout_s)):
            reader, writer = await asyncio.open_connection(host, port)
            await greet(reader, writer, token, address(host, port))
    except _BROKEN as error:
        if writer is not None:
            writer.close()
        reason = str(error) or type(error).__name__
        raise WeightsError(f"no engine of the fleet waits for weights at {host}:{port}: {reason}") from error
    return Meeting(reader, writer, _secret(token, nonce), own_host, timeout_s)
