"""The emulated host: a QEMU process with an emulated AMD processor that has virtualization of its own.

Everything it needs from this machine are pipes, one loopback port of the kernel's choice, and files without a name, so
nothing is left when it ends, and it ends with the process that started it. It must not know what tests do in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from typing import Any

from lab.image import LabImage
from lab.results import LabError

MEMORY_MIB = 3000
PROCESSORS = 2
BOOT_DEADLINE_S = 120
_CONSOLE_LINES = 2000
_AGENT_PORT = 49983
_GATEWAY = "10.0.2.2"
_ADDRESS = "10.0.2.15/24"
_LISTENING = "listening"


class EmulatedHost:
    """One boot. `start` returns when the agent listens."""

    def __init__(self, image: LabImage, initramfs: bytes) -> None:
        self._image = image
        self._initramfs = initramfs
        self._process: subprocess.Popen[bytes] | None = None
        self._console: deque[str] = deque(maxlen=_CONSOLE_LINES)
        self._events: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._monitor: socket.socket | None = None
        self.port = 0
        """Loopback port of this machine that leads to the agent."""
        self.boot_s = 0.0

    def start(self) -> None:
        """Boot.

        Raises:
            LabError: QEMU is missing, or the host did not come up; with its console.
        """
        began = time.monotonic()
        ours, theirs = socket.socketpair()
        initramfs = os.memfd_create("lab-initramfs", 0)
        try:
            with os.fdopen(os.dup(initramfs), "wb") as file:
                file.write(self._initramfs)
            self._process = subprocess.Popen(
                self._command(theirs.fileno(), initramfs),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), initramfs),
                # A Ctrl-C at the terminal is for the tests: they end the host when they are done with it.
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise LabError(f"cannot start QEMU: {error}") from error
        finally:
            theirs.close()
            os.close(initramfs)
        self._monitor = ours
        threading.Thread(target=self._follow_console, name="lab console", daemon=True).start()
        try:
            self.port = self._forwarded_port()
            self._wait_until_listening()
        except BaseException:
            self.stop()
            raise
        self.boot_s = time.monotonic() - began

    def stop(self) -> None:
        """Pull the plug. Idempotent."""
        if self._process is not None:
            # In every state that a fault may have left it in; there is nothing in it to save.
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def console(self) -> str:
        """The last lines of the serial console."""
        return "\n".join(list(self._console))

    def is_running(self) -> bool:
        """Whether QEMU runs."""
        return self._process is not None and self._process.poll() is None

    def _command(self, monitor: int, initramfs: int) -> list[str]:
        kernel_words = [
            *("console=ttyS0", "loglevel=4", "panic=-1", "rcupdate.rcu_cpu_stall_suppress=1", "nowatchdog"),
            *("cryptomgr.notests", "initcall_blacklist=jent_mod_init,load_system_certificate_list"),
            *("mitigations=off", "no_timer_check", "tsc=reliable"),
            *("aenv.root=/dev/vda", f"aenv.ip={_ADDRESS}", f"aenv.gw={_GATEWAY}", "aenv.hostname=lab"),
        ]
        return [
            # The kernel ends QEMU when the tests' process ends in a way that runs no code of ours.
            *("setpriv", "--pdeathsig", "KILL"),
            *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "EPYC,+svm,+npt,-xsaves"),
            *("-smp", str(PROCESSORS), "-m", str(MEMORY_MIB)),
            *("-kernel", str(self._image.kernel), "-initrd", f"/proc/self/fd/{initramfs}"),
            *("-append", " ".join(kernel_words)),
            *("-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"),
            *("-chardev", f"socket,id=monitor,fd={monitor}", "-mon", "chardev=monitor,mode=control"),
            # Only the way in: the host can reach neither this machine nor a network.
            *("-netdev", f"user,id=net,restrict=on,ipv6=off,hostfwd=tcp:127.0.0.1:0-:{_AGENT_PORT}"),
            *("-device", "virtio-net-pci,netdev=net,romfile="),
            # `snapshot` keeps what is written in a file that has no name.
            *("-drive", f"file={self._image.root},format=raw,if=none,id=root,snapshot=on,cache=unsafe"),
            *("-device", "virtio-blk-pci,drive=root", "-device", "virtio-rng-pci"),
        ]

    def _follow_console(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip()
                self._console.append(text)
                if _LISTENING in text:
                    self._events.put(_LISTENING)
        self._events.put("ended")

    def _wait_until_listening(self) -> None:
        try:
            event = self._events.get(timeout=BOOT_DEADLINE_S)
        except queue.Empty:
            event = f"nothing within {BOOT_DEADLINE_S} s"
        if event != _LISTENING:
            raise LabError(f"the emulated host did not come up ({event}); its console:\n{self.console()}")

    def _forwarded_port(self) -> int:
        """Ask QEMU which port it got."""
        assert self._monitor is not None
        self._monitor.settimeout(BOOT_DEADLINE_S)
        with self._monitor.makefile("rw") as stream:

            def ask(command: str, **arguments: str) -> Any:
                stream.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
                stream.flush()
                for line in stream:
                    answer = json.loads(line)
                    if "error" in answer:
                        raise LabError(f"QEMU refused {command}: {answer['error']}")
                    if "return" in answer:
                        return answer["return"]
                raise LabError(f"QEMU ended; it said:\n{self.console()}")

            if not stream.readline():
                raise LabError(f"QEMU did not start; it said:\n{self.console()}")
            ask("qmp_capabilities")
            table = ask("human-monitor-command", **{"command-line": "info usernet"})
        found = re.search(r"TCP\[HOST_FORWARD\]\s+\d+\s+127\.0\.0\.1\s+(\d+)", table)
        if found is None:
            raise LabError(f"QEMU forwards no port: {table}")
        return int(found.group(1))
