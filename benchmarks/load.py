"""How fast weights come in, from a disk, the page cache and an S3 server, against plain ways to read them; and what memory each takes.

    python -m benchmarks.load [--device cuda]

Floor: the same ranges by as many threads, thrown away; `kept`: into memory that stays. Each measurement is a process of its own; ways take
turns, the best round counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.report import Row, publish
from cluster.checkpoint import Checkpoint, read_checkpoint
from cluster.weight_plan import plan_node
from cluster.weight_reader import LoadSettings, sole_reader
from model.config import ModelConfig

CONFIG = ModelConfig.tiny(  # 2 GB in tensors of megabytes, as the released ones are
    num_experts=40, hidden_size=2048, routed_expert_hidden_size=2048, moe_intermediate_size=2048, intermediate_size=4096, vocab_size=16384
)
ROUNDS = 3
BUCKET = "weights"
SETTINGS = LoadSettings(buffer_bytes=256 << 20, threads=8)
FOLDER_SERVER = """
import os, re, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def do_GET(self):
        path = os.path.join(sys.argv[1], self.path.partition("?")[0].split("/", 3)[-1])
        if not os.path.isfile(path):
            self.send_response(404); self.send_header("Content-Length", "0"); self.end_headers(); return
        size = os.path.getsize(path)
        found = re.fullmatch(r"bytes=(\\d+)-(\\d*)", self.headers.get("Range", ""))
        start, stop = (int(found[1]), min(int(found[2] or size) + 1, size)) if found else (0, size)
        self.send_response(206 if found else 200)
        if found: self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", '"tag"'); self.send_header("Last-Modified", "Tue, 01 Dec 2026 00:00:00 GMT")
        self.end_headers(); self.wfile.flush()
        if self.command == "GET":
            with open(path, "rb") as f: self.connection.sendfile(f, start, stop - start)
    do_HEAD = do_GET

class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

server = Server(("127.0.0.1", 0), Handler)
print(*server.server_address, flush=True)
server.serve_forever()
"""  # S3's GET and HEAD over a folder, by sendfile: moto copies the whole object for each range, 60 MB/s whoever asks


def ours(checkpoint: Checkpoint, device: str) -> None:
    """Into the model's parameters, in the memory of the device."""
    import torch

    from model.loader import load
    from model.parallel import Mesh

    load(checkpoint.config, Mesh.single(), sole_reader(checkpoint, SETTINGS), device=device, dtype=torch.bfloat16)
    if device == "cuda":
        torch.cuda.synchronize()


def floor(checkpoint: Checkpoint, device: str) -> None:
    """The same ranges, thrown away; into as many buffers as there are threads."""
    _raw_reads(checkpoint, kept=False)


def kept(checkpoint: Checkpoint, device: str) -> None:
    """The same ranges into host memory that stays: whoever keeps what he reads writes it once at least."""
    _raw_reads(checkpoint, kept=True)


def _raw_reads(checkpoint: Checkpoint, *, kept: bool) -> None:
    plan = plan_node(checkpoint, [0], tp=1, shards=1, block_bytes=SETTINGS.block_bytes)
    source = checkpoint.open(connections=SETTINGS.threads)
    client = None if checkpoint.endpoint_url is None else _client(checkpoint.endpoint_url)
    starts = [0, *itertools.accumulate(r.nbytes for r in plan.ranges)]
    memory = memoryview(mmap.mmap(-1, starts[-1] if kept else SETTINGS.threads * plan.largest))

    def read(number: int) -> None:
        r = plan.ranges[number]
        begin = starts[number] if kept else number % SETTINGS.threads * plan.largest
        buffer = memory[begin : begin + r.nbytes]
        where = source.where(checkpoint.files[r.file].name)
        if client is None:
            with open(where, "rb", buffering=0) as f:
                f.seek(r.start)
                f.readinto(buffer)
            return
        key = where.removeprefix(f"s3://{BUCKET}/")
        body = client.get_object(Bucket=BUCKET, Key=key, Range=f"bytes={r.start}-{r.stop - 1}")["Body"]  # type: ignore[attr-defined]
        if kept:
            buffer[:] = body.read()
        else:
            body.read()

    with ThreadPoolExecutor(SETTINGS.threads) as pool:
        list(pool.map(read, range(len(plan.ranges))))


def whole_files(checkpoint: Checkpoint, device: str) -> None:
    """`boto3.download_file`, then safetensors; on disk safetensors alone."""
    from safetensors import safe_open

    with tempfile.TemporaryDirectory() as folder:
        for file in checkpoint.files:
            path = checkpoint.open().where(file.name)
            if checkpoint.endpoint_url is not None:
                key, path = path.removeprefix(f"s3://{BUCKET}/"), f"{folder}/{file.name}"
                _client(checkpoint.endpoint_url).download_file(BUCKET, key, path)  # type: ignore[attr-defined]
            with safe_open(path, framework="pt") as f:
                kept = [f.get_tensor(name).clone().to(device) for name in f.keys()]  # noqa: SIM118
            del kept


def runai(checkpoint: Checkpoint, device: str) -> None:
    from runai_model_streamer import SafetensorsStreamer

    if checkpoint.endpoint_url is not None:
        os.environ |= {"AWS_ENDPOINT_URL": checkpoint.endpoint_url, "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}
    os.environ |= {"RUNAI_STREAMER_CONCURRENCY": str(SETTINGS.threads), "RUNAI_STREAMER_MEMORY_LIMIT": str(SETTINGS.buffer_bytes)}
    source = checkpoint.open()
    with SafetensorsStreamer() as streamer:
        streamer.stream_files([source.where(file.name) for file in checkpoint.files])
        for _, tensor in streamer.get_tensors():
            tensor.clone().to(device)


WAYS: dict[str, Callable[[Checkpoint, str], None]] = {
    "ours": ours,
    "floor": floor,
    "kept": kept,
    "download + safetensors": whole_files,
    "runai": runai,
}


def measure(way: str, url: str, endpoint: str | None, device: str) -> tuple[float, float] | None:
    """(GB/s, peak GB of the process above what it was before), in a process of its own; None: it failed."""
    words = [sys.executable, "-m", "benchmarks.load", "--device", device, "--child", way, url, *([endpoint] if endpoint else [])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{way} from {url}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return result["rate"], result["peak"]


def child(way: str, url: str, endpoint: str | None, device: str) -> None:
    import torch  # counted before

    torch.set_num_threads(1)
    torch.empty(1, device=device)
    checkpoint = read_checkpoint(url, endpoint)
    touched = torch.ones(
        2 * sum(file.size for file in checkpoint.files), dtype=torch.uint8
    )  # a virtual machine gets its memory when it first writes it
    del touched
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, begin = _peak(), time.perf_counter()
    WAYS[way](checkpoint, device)
    seconds = time.perf_counter() - begin
    peak = _peak() - before
    print(json.dumps({"rate": sum(file.size for file in checkpoint.files) / seconds / 1e9, "peak": peak / 1e9}))


def _peak() -> int:
    """Bytes of memory that this process held at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _client(endpoint: str) -> object:
    import boto3
    from botocore.config import Config

    return boto3.client("s3", endpoint_url=endpoint, config=Config(max_pool_connections=SETTINGS.threads))


def compare(device: str) -> None:
    from model.checkpoint import write_random_checkpoint

    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint(folder, CONFIG, 1)
        server = subprocess.Popen([sys.executable, "-c", FOLDER_SERVER, folder], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            host, port = server.stdout.readline().split()
            endpoint = f"http://{host}:{port}"
            size = sum(file.size for file in read_checkpoint(folder).files)
            rows = []
            for place, url, where in (("disk", folder, None), ("page cache", folder, None), ("S3 server", f"s3://{BUCKET}/k3", endpoint)):
                rates: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
                for _ in range(ROUNDS):
                    for way in WAYS:
                        if place == "disk":
                            _forget(folder)
                        if (found := measure(way, url, where, device)) is not None:
                            rates[way].append(found)
                best = {way: max(rate for rate, _ in seen) for way, seen in rates.items() if seen}
                peaks = {way: max(peak for _, peak in seen) for way, seen in rates.items() if seen}
                rows += [_row(f"from {place}", "GB/s", best, 0.9 * best["floor"]), _row(f"peak memory, {place}", "GB", peaks, None)]
        finally:
            server.kill()
            server.wait()
    notes = (
        f"{size / 1e9:.2f} GB, {SETTINGS.threads} threads, {SETTINGS.buffer_bytes >> 20} MiB of buffers; best of {ROUNDS} rounds; peak "
        "above the process at rest: ours holds the model when done, the floor nothing, the others a file's tensors or one tensor at a time"
    )
    publish(
        "load" if device == "cpu" else f"load_{device}",
        rows,
        packages=("torch", "boto3", "safetensors", "moto", "runai-model-streamer"),
        notes=notes,
    )


def _forget(folder: str) -> None:
    """Puts the files out of the page cache."""
    for name in os.listdir(folder):
        descriptor = os.open(f"{folder}/{name}", os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _row(work: str, unit: str, values: dict[str, float], target: float | None) -> Row:
    peers = {way: value for way, value in values.items() if way not in ("ours", "floor")}
    return Row(work=work, ours=values["ours"], floor=values["floor"], target=target, unit=unit, peers=peers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--child", nargs="+", metavar=("WAY", "URL"), help="one measurement, in this process")
    args = parser.parse_args()
    if args.child:
        way, url, *endpoint = args.child
        child(way, url, endpoint[0] if endpoint else None, args.device)
    else:
        compare(args.device)


if __name__ == "__main__":
    main()
