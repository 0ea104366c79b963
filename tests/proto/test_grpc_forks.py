"""Processes forked while other threads are inside gRPC, like the workers of a DataLoader."""

import subprocess
import sys
import textwrap

SCRIPT = """
    import gc
    import multiprocessing
    import sys
    import threading
    from concurrent.futures import ThreadPoolExecutor

    import shoal
    import grpc

    server = grpc.server(ThreadPoolExecutor(4))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    def call():
        while True:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                ask = channel.unary_unary("/no/such")
                for _ in range(20):
                    try:
                        ask(b"", timeout=20)
                    except grpc.RpcError:
                        pass

    for _ in range(3):
        threading.Thread(target=call, daemon=True).start()
    context = multiprocessing.get_context("fork")
    codes = []
    for _ in range(40):
        children = [context.Process(target=gc.collect) for _ in range(3)]
        for child in children:
            child.start()
        for child in children:
            child.join(20)
            codes.append(child.exitcode)
            child.kill()
    print(sorted(set(codes), key=str))
"""


def test_forked_children_end_normally_while_grpc_is_busy() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={},
    )
    assert ended.stdout == "[0]\n", ended.stdout + ended.stderr
