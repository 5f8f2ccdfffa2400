"""The engine process: assembles a core and serves messages. Started by `seawall.process`.

    main thread    waits for messages, hands them to the core thread
    core thread    computes, and sends what it has to say itself
    caller threads wait for functions that run between two steps
    lifeline       waits for the end of stdin: whoever started this process has ended

The first line of stdin has the engine's arguments as JSON, the command line the two addresses.
"""

import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import zmq

from seawall.core.config import EngineConfig
from seawall.core.errors import (
    BudgetError,
    ConfigError,
    EngineError,
    ModelError,
    RequestError,
    SeawallError,
)
from seawall.core.wire import (
    AbortRequest,
    FinishReason,
    FinishRequest,
    FlushCache,
    FromCore,
    GenerateRequest,
    OutputDelta,
)
from seawall.engine.assemble import Assembly, assemble
from seawall.engine.devices import choose_device
from seawall.engine.driver import CoreThread
from seawall.engine.page_map import page_map
from seawall.engine.planning import EnginePlan, make_plan, model_folder, read_json
from seawall.process.codec import core_codec
from seawall.process.messages import Call, CallDone, FailureKind, Ready, StartFailed, Stop

logger = logging.getLogger("seawall.engine")

_PARENT_GONE = 3
_CORE_DIED = 4
# How long a process that ends waits for its last words to be read.
_LINGER_MS = 2000
_CALLERS = 4
_GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Outlet:
    """Sends to the front end; any thread may."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self._codec = core_codec()
        self._lock = threading.Lock()
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(address)

    def send(self, kind: bytes, message: object) -> None:
        """Send one message; never waits for the reader."""
        with self._lock:
            self._socket.send_multipart(self._codec.encode(kind, message))

    def deltas(self, parcel: list[FromCore]) -> None:
        """What a turn added to requests: the mailbox of them all."""
        self.send(b"deltas", [item for item in parcel if isinstance(item, OutputDelta)])

    def close(self) -> None:
        """Nothing is sent any more; what was sent is still delivered."""
        with self._lock:
            self._socket.close()


class Calls:
    """The functions that a front end may call by name.

    They wait for the core thread in threads of their own, so that messages are taken meanwhile.
    """

    def __init__(self, thread: CoreThread, outlet: Outlet) -> None:
        self._thread = thread
        self._outlet = outlet
        self._pool = ThreadPoolExecutor(_CALLERS, thread_name_prefix="seawall-call")
        assembly = thread.assembly
        self._functions: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
            "ping": lambda _: thread.call(lambda: None),
            "memory_report": lambda _: thread.call(assembly.memory_report),
            "server_info": lambda _: thread.call(assembly.server_info),
            "page_map": lambda _: thread.call(lambda: page_map(assembly.core.leases.ledger)),
            "flush_cache": lambda _: self._flush_cache(),
            "release_memory_occupation": lambda args: thread.call(
                lambda: assembly.control.release(args.get("tags"))
            ),
            "resume_memory_occupation": lambda args: thread.call(
                lambda: assembly.control.resume(args.get("tags"))
            ),
            "update_weights_from_disk": self._update_weights,
        }

    def start(self, call: Call) -> None:
        """Run a call; its answer is sent when it comes."""
        self._pool.submit(self._run, call)

    def close(self) -> None:
        """Take no more calls; the core thread has answered the others."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, call: Call) -> None:
        try:
            value = self._functions[call.name](call.args)
            done = CallDone(ticket=call.ticket, value=value)
        except SeawallError as error:
            done = _failed(call, _kind(error), str(error))
        except Exception as error:  # process boundary: the answer is an error, and it is logged
            logger.exception("call %s failed", call.name)
            done = _failed(call, "engine", f"{call.name}: {type(error).__name__}: {error}")
        self._outlet.send(b"done", done)

    def _flush_cache(self) -> bool:
        """Drop cached pages; False while requests run."""
        answers: list[FromCore] = []
        came = threading.Event()

        def mailbox(parcel: list[FromCore]) -> None:
            answers.extend(parcel)
            came.set()

        ticket = threading.get_ident()
        self._thread.submit(f"ticket {ticket}", FlushCache(ticket=ticket), mailbox)
        came.wait()
        [answer] = answers
        assert not isinstance(answer, OutputDelta)
        return answer.done

    def _update_weights(self, args: Mapping[str, Any]) -> str:
        load_format = args.get("load_format")
        if load_format not in (None, "auto", "safetensors"):
            raise RequestError(
                f"load_format: got {load_format!r}, updates are read as 'auto' or 'safetensors'"
            )
        folder = model_folder(args["model_path"])
        if args.get("abort_all_requests"):
            self._thread.send(AbortRequest(rid=None))
        control, version = self._thread.assembly.control, args.get("weight_version")
        self._thread.call_when_idle(lambda: control.update_from_folder(folder, version))
        return f"weights were read from {args['model_path']}"


class Server:
    """Takes messages until it is told to stop; the main thread's."""

    def __init__(
        self, thread: CoreThread, inlet: "zmq.Socket[bytes]", outlet: Outlet, calls: Calls
    ) -> None:
        self._thread = thread
        self._inlet = inlet
        self._outlet = outlet
        self._calls = calls
        self._codec = core_codec()

    def serve(self) -> None:
        """Returns once a Stop came."""
        while True:
            _, message = self._codec.decode(self._inlet.recv_multipart())
            if isinstance(message, Stop):
                return
            self._take(message)

    def _take(self, message: object) -> None:
        if isinstance(message, GenerateRequest):
            self._submit(message)
        elif isinstance(message, AbortRequest | FinishRequest):
            self._thread.send(message)
        else:
            assert isinstance(message, Call)
            self._calls.start(message)

    def _submit(self, message: GenerateRequest) -> None:
        try:
            self._thread.submit(message.rid, message, self._outlet.deltas)
        except SeawallError as error:
            status = 400 if isinstance(error, RequestError) else 500
            finish = FinishReason(type="abort", message=str(error), status_code=status)
            self._outlet.deltas(
                [
                    OutputDelta(rid=message.rid, index=index, finish=finish)
                    for index in range(message.sampling.n)
                ]
            )


def main(argv: list[str]) -> int:
    """Serve until told to stop; returns the exit code."""
    to_core, from_core = argv
    args = json.loads(sys.stdin.buffer.readline())
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    threading.Thread(
        target=_lifeline, args=(to_core,), name="seawall-lifeline", daemon=True
    ).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inlet = context.socket(zmq.PULL)
    inlet.setsockopt(zmq.RCVHWM, 0)
    inlet.setsockopt(zmq.LINGER, 0)
    inlet.connect(to_core)
    outlet = Outlet(context, from_core)
    try:
        code = _run(args, inlet, outlet)
    finally:
        inlet.close()
        outlet.close()
        context.term()
    return code


def _run(args: Mapping[str, object], inlet: "zmq.Socket[bytes]", outlet: Outlet) -> int:
    try:
        device = choose_device(args)
        config = EngineConfig.from_args(args, device.name)
        logging.getLogger("seawall").setLevel(config.log_level.upper())
        plan = make_plan(config, device_memory=device.memory_bytes)
        thread = CoreThread(lambda: assemble(config, plan))
    except SeawallError as error:
        table = error.table if isinstance(error, BudgetError) else ""
        outlet.send(b"failed", StartFailed(kind=_kind(error), message=str(error), table=table))
        return 1
    stopping = threading.Event()
    watcher = threading.Thread(target=_watch, args=(thread, outlet, stopping), daemon=True)
    watcher.start()
    calls = Calls(thread, outlet)
    outlet.send(b"ready", _ready(config, plan, thread.assembly))
    Server(thread, inlet, outlet, calls).serve()
    stopping.set()
    thread.stop()
    calls.close()
    thread.assembly.close()
    return 0


def _ready(config: EngineConfig, plan: EnginePlan, assembly: Assembly) -> Ready:
    tokenizer = None if config.model.skip_tokenizer_init else str(plan.tokenizer_folder)
    return Ready(
        pid=os.getpid(),
        model_path=config.model.model_path,
        tokenizer_folder=tokenizer,
        limits=assembly.request_limits,
        random_seed=assembly.random_seed,
        logprobs_mode=config.logprobs_mode,
        dtype=plan.dtype,
        generation_defaults=_generation_defaults(plan),
        max_running=plan.limits.max_running,
        max_queued=config.schedule.max_queued_requests,
        plan_table=plan.table(),
    )


def _generation_defaults(plan: EnginePlan) -> dict[str, float]:
    """Sampling parameters of generation_config.json."""
    path = plan.folder / "generation_config.json"
    found = read_json(path) if path.is_file() else {}
    defaults: dict[str, float] = {}
    for name in _GENERATION_DEFAULTS:
        value = found.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            defaults[name] = value
    if defaults.get("top_k") == 0:  # transformers' way to turn it off
        del defaults["top_k"]
    return defaults


def _watch(thread: CoreThread, outlet: Outlet, stopping: threading.Event) -> None:
    """A process without a core is of no use: end it, so that another is started."""
    thread.join()
    if not stopping.is_set():
        outlet.close()
        # The main thread sleeps in a socket that only the front end could wake it from.
        threading.Timer(_LINGER_MS / 4000, os._exit, (_CORE_DIED,)).start()


def _lifeline(address: str) -> None:
    """End with the parent, and remove the sockets that it can't remove any more."""
    # Not through sys.stdin: its lock would be held when the interpreter ends.
    while os.read(0, 4096):
        pass
    shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
    os._exit(_PARENT_GONE)


def _failed(call: Call, kind: FailureKind, message: str) -> CallDone:
    return CallDone(ticket=call.ticket, failure=kind, message=message)


def _kind(error: SeawallError) -> FailureKind:
    kinds: tuple[tuple[type[SeawallError], FailureKind], ...] = (
        (BudgetError, "budget"),
        (ConfigError, "config"),
        (ModelError, "model"),
        (RequestError, "request"),
        (EngineError, "engine"),
    )
    return next((kind for of, kind in kinds if isinstance(error, of)), "engine")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
