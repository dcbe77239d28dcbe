"""A first look: start a sandbox, run commands, write and read files, serve HTTP from inside.

It uses the official E2B package, unchanged. Where the server is comes from the environment:

    eval "$(aenv env)"
    python examples/quickstart.py
"""

import os
import time
import urllib.request

from e2b import Sandbox


def main() -> None:
    begun = time.monotonic()
    with Sandbox.create(timeout=120, metadata={"example": "quickstart"}) as sandbox:
        print(f"sandbox {sandbox.sandbox_id} is ready after {time.monotonic() - begun:.1f} s")

        result = sandbox.commands.run("uname -sr; id -un; pwd")
        print("inside it:", *result.stdout.splitlines(), sep="\n    ")

        sandbox.files.write("notes/hello.txt", "hello from outside\n")
        print("a file:", sandbox.files.read("notes/hello.txt").strip())
        for entry in sandbox.files.list("notes"):
            print(f"    {entry.path}  {entry.size} bytes  {entry.permissions}  {entry.owner}")

        print("python in the guest:", sandbox.commands.run("python3 -c 'print(sum(range(101)))'").stdout.strip())

        streamed = sandbox.commands.run("for i in 1 2 3; do echo line $i; done", on_stdout=lambda line: None)
        print("streamed:", streamed.stdout.split("\n")[:3], "exit code", streamed.exit_code)

        server = sandbox.commands.run("python3 -u -m http.server 8080 --bind 127.0.0.1", background=True)
        for _stdout, _stderr, _pty in server:
            break  # the first line says that it listens
        request = urllib.request.Request(
            os.environ["E2B_SANDBOX_URL"] + "/notes/hello.txt",
            headers={"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "8080"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            print(f"its web server on port 8080 answers {answer.status}: {answer.read().decode().strip()}")
        print(f"for a browser: http://{sandbox.get_host(8080)}/")
        server.kill()
    print("the sandbox is gone")


if __name__ == "__main__":
    main()
