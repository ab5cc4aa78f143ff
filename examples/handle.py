"""A Python program as a client: no HTTP, the deployment handle itself.

    make serve                          # in one terminal
    .venv/bin/python examples/handle.py # in another, on a machine of the same Ray cluster

`chat` takes and gives what POST /v1/chat/completions does; `generate` is tokens in, tokens out. Errors arrive as the exceptions of
`engine.errors` (inside Ray's RayTaskError: its `cause`).
"""

from __future__ import annotations

import argparse
import asyncio
import os

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--address", default="auto", help="Ray's address; auto = the Ray that `k3 serve` started on this machine")
address = parser.parse_args().address
if address == "auto" or address.startswith("127."):  # as `k3 serve` starts Ray: on the loopback interface, without a token
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled"}

import ray
from ray import serve

from engine.types import SamplingParams


async def main() -> None:
    handle = serve.get_app_handle("k3")

    answer = await handle.chat.remote({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16, "temperature": 0})
    print("chat:", answer["choices"][0]["message"], answer["usage"]["completion_tokens"], "tokens")

    streaming = handle.options(stream=True)
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16, "temperature": 0}
    print("chat_stream:", end=" ", flush=True)
    async for frame in streaming.chat_stream.remote(body):
        for choice in frame["choices"]:
            print(choice["delta"].get("reasoning_content") or choice["delta"].get("content") or "", end="", flush=True)
    print()

    async for chunk in streaming.generate.remote([1, 2, 3], max_tokens=8, sampling=SamplingParams(temperature=0)):
        print("generate:", chunk.token_ids, chunk.finish or "", chunk.usage or "")


if __name__ == "__main__":
    ray.init(address=address, namespace="serve", log_to_driver=False, logging_level="WARNING")
    asyncio.run(main())
