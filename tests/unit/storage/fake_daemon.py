"""A block daemon for tests: speaks docs/blockd.md, keeps its state as the real one does, and stacks toy layers.

A toy layer is a JSON file: `{"uuid", "parent_uuid", "virtual_size", "sealed", "blocks": {number: text}}`; an upper is
`upper.data` of the same form. Methods that begin with `fake_` are for tests. Runs as a program, like the real one.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import socketserver
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

PROTOCOL = int(os.environ.get("FAKE_PROTOCOL", "1"))

COUNTERS = (
    *("reads", "read_bytes", "writes", "written_bytes", "discards", "discarded_bytes", "flushes", "errors"),
    *("in_flight", "connections", "upper_records", "upper_data_bytes", "upper_allocated_bytes"),
    *("depth", "merged_records"),
)


class RefusalError(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def read_layer(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        content["blocks"]
    except FileNotFoundError as error:
        raise RefusalError("not_found", f"{path}: no such file") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RefusalError("bad_layer", f"{path} is no layer") from error
    return content  # type: ignore[no-any-return]


def write(path: Path, content: object) -> None:
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    draft.write_text(json.dumps(content))
    draft.replace(path)


class Daemon:
    def __init__(self, state: Path) -> None:
        self.devices_dir = state / "devices"
        self.devices_dir.mkdir(mode=0o700, exist_ok=True)
        self.lock = threading.RLock()
        self.devices: dict[str, dict[str, Any]] = {}
        self.sockets: dict[str, socket.socket] = {}
        self.subscribers: list[Any] = []
        self.refusals: dict[str, tuple[str, int]] = {}
        self.deaths: dict[str, str] = {}
        self.gates: dict[str, threading.Event] = {}
        self.calls: list[str] = []
        self.full_after_switch = False
        self.failed: list[tuple[str, str]] = []
        for path in self.devices_dir.glob("[!.]*.json"):
            device = json.loads(path.read_text())
            self.devices[device["device"]] = device
            try:
                self._finish_restack(device)
                self._open_parts(device)
            except RefusalError as refusal:
                device["error"] = str(refusal)
                self.failed.append((device["device"], str(refusal)))

    def _open_parts(self, device: dict[str, Any]) -> None:
        for lower in device["lowers"]:
            read_layer(Path(lower))
        self._make_upper(device)
        for export in device["exports"]:
            self._listen(export["path"])
        device.pop("error", None)

    def call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        gate = self.gates.pop(method, None)
        if gate is not None:
            gate.wait()
        with self.lock:
            self.calls.append(method)
            code, count = self.refusals.get(method, ("", 0))
            if count > 0:
                self.refusals[method] = (code, count - 1)
                raise RefusalError(code, f"told to refuse {method}")
            if self.deaths.get(method) == "before":
                os._exit(9)
            handler = getattr(self, f"do_{method}", None)
            if handler is None:
                raise RefusalError("bad_request", f"unknown method {method}")
            result: dict[str, Any] = handler(**params)
            if self.deaths.get(method) == "after":
                os._exit(9)
            return result

    def do_open(self, device: str, lowers: list[str], upper: dict[str, Any] | None = None) -> dict[str, Any]:
        virtual_size = 0
        if upper is not None:
            virtual_size = upper.pop("virtual_size", 0)
        if device in self.devices:
            known = self.devices[device]
            if (known["lowers"], known["upper"]) != (lowers, upper):
                raise RefusalError("conflict", f"{device} is open with other parts")
            if "error" in known:
                self._open_parts(known)
            return known
        layers = [read_layer(Path(path)) for path in lowers]
        if any(not layer["sealed"] for layer in layers):
            raise RefusalError("bad_layer", "a lower is not sealed")
        size = virtual_size or (layers[-1]["virtual_size"] if layers else 0)
        made = {
            "device": device,
            "lowers": lowers,
            "upper": upper,
            "virtual_size": size,
            "read_only": upper is None,
            "opens": 1,
            "exports": [],
        }
        self._save(made)
        try:
            self._make_upper(made)
        except OSError as error:
            self._path(device).unlink()
            raise RefusalError("io", str(error)) from error
        self.devices[device] = made
        return made

    def do_export(self, device: str, kind: str, path: str) -> dict[str, Any]:
        known = self._device(device)
        export = {"kind": kind, "path": path}
        if export not in known["exports"]:
            known["exports"].append(export)
            self._save(known)
            self._listen(path)
        return {"export": export}

    def do_unexport(self, device: str, path: str) -> dict[str, Any]:
        known = self._device(device)
        known["exports"] = [export for export in known["exports"] if export["path"] != path]
        self._save(known)
        self._silence(path)
        return {}

    def do_flush(self, device: str) -> dict[str, Any]:
        self._device(device)
        return {}

    def do_restack(self, device: str, layer: str, uuid: str | None = None) -> dict[str, Any]:
        known = self._device(device)
        if known["upper"] is None:
            raise RefusalError("conflict", f"{device} has no upper")
        self._finish_restack(known)
        if Path(layer).exists():
            raise RefusalError("conflict", f"{layer} exists")
        data = Path(known["upper"]["directory"]) / "upper.data"
        sealed = read_layer(data) | {"sealed": True}
        write(data, sealed)
        data.rename(layer)
        known["restack"] = layer
        self._make_upper(known, name=uuid)
        if self.full_after_switch:
            self.full_after_switch = False
            self._save(known)
            raise RefusalError("no_space", "told to find no room for the note of the restack")
        self._finish_restack(known)
        facts = {key: sealed[key] for key in ("uuid", "parent_uuid", "virtual_size")}
        size = Path(layer).stat().st_size
        return {"layer": {"path": layer, "records": 1, "data_bytes": 1, "size": size, **facts}, "paused_us": 12}

    def _finish_restack(self, known: dict[str, Any]) -> None:
        layer = known.pop("restack", None)
        if layer is not None:
            known["lowers"] = [*known["lowers"], layer]
            self._save(known)

    def do_fake_full_after_switch(self) -> dict[str, Any]:
        self.full_after_switch = True
        return {}

    def do_replace(self, device: str, first: int, count: int, layer: str) -> dict[str, Any]:
        known = self._device(device)
        if "restack" in known:
            raise RefusalError("conflict", "a restack is not finished")
        read_layer(Path(layer))
        if first + count > len(known["lowers"]):
            raise RefusalError("bad_request", "no such lowers")
        known["lowers"] = [*known["lowers"][:first], layer, *known["lowers"][first + count :]]
        self._save(known)
        return {}

    def do_resize(self, device: str, virtual_size: int) -> dict[str, Any]:
        known = self._device(device)
        known["virtual_size"] = virtual_size
        self._save(known)
        return {}

    def do_close(self, device: str, remove_upper: bool = False) -> dict[str, Any]:
        known = self._device(device)
        for export in known["exports"]:
            self._silence(export["path"])
        if remove_upper and known["upper"] is not None:
            for name in ("upper.data", "upper.index"):
                (Path(known["upper"]["directory"]) / name).unlink(missing_ok=True)
        self._path(device).unlink(missing_ok=True)
        del self.devices[device]
        return {}

    def do_list(self) -> dict[str, Any]:
        return {"devices": list(self.devices.values())}

    def do_stats(self, device: str | None = None) -> dict[str, Any]:
        names = [device] if device else list(self.devices)
        zero = dict.fromkeys(COUNTERS, 0)
        uses: dict[str, int] = {}
        for known in self.devices.values():
            for path in known["lowers"]:
                uses[path] = uses.get(path, 0) + 1
        return {
            "daemon": {"uptime_s": 1.5, "open_layers": len(uses), "threads": threading.active_count()},
            "devices": {name: zero | {"depth": len(self._device(name)["lowers"])} for name in names},
            "layers": [{"path": path, "uuid": None, "devices": count} for path, count in uses.items()],
        }

    def do_fake_write(self, device: str, block: int, text: str) -> dict[str, Any]:
        data = Path(self._device(device)["upper"]["directory"]) / "upper.data"
        upper = read_layer(data)
        upper["blocks"][str(block)] = text
        write(data, upper)
        return {}

    def do_fake_read(self, device: str) -> dict[str, Any]:
        known = self._device(device)
        blocks: dict[str, str] = {}
        for path in [*known["lowers"], *([known["restack"]] if "restack" in known else [])]:
            blocks |= read_layer(Path(path))["blocks"]
        if known["upper"] is not None:
            blocks |= read_layer(Path(known["upper"]["directory"]) / "upper.data")["blocks"]
        return blocks

    def do_fake_refuse(self, method: str, code: str, count: int = 1) -> dict[str, Any]:
        self.refusals[method] = (code, count)
        return {}

    def do_fake_die(self, method: str, when: str) -> dict[str, Any]:
        self.deaths[method] = when
        return {}

    def do_fake_hold(self, method: str) -> dict[str, Any]:
        self.gates[method] = threading.Event()
        self.gates["held " + method] = self.gates[method]
        return {}

    def do_fake_release(self, method: str) -> dict[str, Any]:
        self.gates.pop("held " + method).set()
        return {}

    def do_fake_calls(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def do_fake_lose(self, device: str) -> dict[str, Any]:
        known = self.devices.pop(device)
        for export in known["exports"]:
            self._silence(export["path"])
        self._path(device).unlink()
        return {}

    def do_fake_event(self, **event: str) -> dict[str, Any]:
        for stream in self.subscribers:
            stream.write(json.dumps(event).encode() + b"\n")
            stream.flush()
        return {"subscribers": len(self.subscribers)}

    def _device(self, name: str) -> dict[str, Any]:
        if name not in self.devices:
            raise RefusalError("not_found", f"there is no device {name}")
        return self.devices[name]

    def _path(self, name: str) -> Path:
        return self.devices_dir / f"{name}.json"

    def _save(self, device: dict[str, Any]) -> None:
        write(self._path(device["device"]), device)

    def _make_upper(self, device: dict[str, Any], name: str | None = None) -> None:
        if device["upper"] is None:
            return
        data = Path(device["upper"]["directory"]) / "upper.data"
        if data.exists():
            return
        below = device.get("restack") or (device["lowers"][-1] if device["lowers"] else None)
        parent = read_layer(Path(below))["uuid"] if below else None
        upper = {
            "uuid": name or str(uuid.uuid4()),
            "parent_uuid": parent,
            "virtual_size": device["virtual_size"],
            "sealed": False,
            "blocks": {},
        }
        write(data, upper)
        (data.parent / "upper.index").touch()

    def _listen(self, path: str) -> None:
        Path(path).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        self.sockets[path] = listener

    def _silence(self, path: str) -> None:
        listener = self.sockets.pop(path, None)
        if listener is not None:
            listener.close()
        Path(path).unlink(missing_ok=True)


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        greeting = {"blockd": {"protocol": PROTOCOL, "version": "fake", "pid": os.getpid()}}
        self.wfile.write(json.dumps(greeting).encode() + b"\n")
        daemon: Daemon = self.server.daemon  # type: ignore[attr-defined]
        for line in self.rfile:
            request = json.loads(line)
            answer: dict[str, Any] = {"id": request["id"]}
            try:
                if request["method"] == "subscribe":
                    with daemon.lock:
                        daemon.subscribers.append(self.wfile)
                    answer["result"] = {}
                elif request["method"] == "shutdown":
                    answer["result"] = {}
                    threading.Thread(target=self.server.shutdown).start()
                else:
                    answer["result"] = daemon.call(request["method"], request["params"])
            except RefusalError as refusal:
                answer["error"] = {"code": refusal.code, "message": str(refusal)}
            except TypeError as error:
                answer["error"] = {"code": "bad_request", "message": str(error)}
            try:
                self.wfile.write(json.dumps(answer).encode() + b"\n")
            except OSError:
                return
            if request["method"] == "subscribe":
                for device, message in daemon.failed:
                    event = {"event": "failed", "device": device, "message": message}
                    self.wfile.write(json.dumps(event).encode() + b"\n")
                daemon.failed = []


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        print("fake")
        return
    state, path = Path(sys.argv[3]), Path(sys.argv[5])
    if (state / "fail-to-start").exists():
        sys.exit("told not to start")
    if (state / "start-slowly").exists():
        time.sleep(1)
    lock = os.open(state / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    daemon = Daemon(state)
    os.chdir(path.parent)  # the path may be longer than a socket address
    draft = Path(f".{path.name}.{os.getpid()}")
    with Server(str(draft), Handler) as server:
        server.daemon = daemon  # type: ignore[attr-defined]
        draft.rename(path.name)
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
        print("the fake daemon listens", file=sys.stderr, flush=True)
        server.serve_forever(poll_interval=0.02)
        path.unlink(missing_ok=True)
    for known in daemon.devices.values():
        for export in known["exports"]:
            Path(export["path"]).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
