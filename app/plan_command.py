"""`k3 plan` and `k3 cost`: the planner's and the break-even's figures as tables or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from app.terminal import clear_errors, print_table
from cluster.accelerators import ACCELERATORS, Accelerator, read_accelerators
from cluster.cost import LIST_PRICES, Machine, Turn, chart
from cluster.planner import PEER_POOL, ClusterPlan, Workload, peer_gap, plan, smallest_layouts
from engine.errors import ConfigError
from model.config import ModelConfig
from model.released import RELEASED

commands = typer.Typer()

SMALLEST = ("accelerator", "count", "tp", "live_sessions", "max_context")
RESERVE_GB = round(Workload().reserve / 1e9, 3)

Model = Annotated[
    str,
    typer.Option(help=f"directory with a checkpoint's config.json, whose weights are not read, or a released one: {', '.join(RELEASED)}"),
]
Name = Annotated[str | None, typer.Option(help="row of the accelerator table; none = the smallest layout of each that fits")]
Count = Annotated[int, typer.Option(min=1, help="accelerators of a replica")]
NodeSize = Annotated[int, typer.Option(min=1, help="accelerators of a node")]
Width = Annotated[int | None, typer.Option(min=1, help="tensor-parallel width; none = the one that holds most sessions")]
Context = Annotated[int, typer.Option(min=1, help="tokens of a live session")]
Prompt = Annotated[int, typer.Option(min=1, help="new tokens of a turn")]
OutputRate = Annotated[float, typer.Option(help="tokens a second that every generating session must get at least")]
LatentBytes = Annotated[int, typer.Option(help="bytes of a latent's element: 2 (bf16) or 1 (fp8)")]
Table = Annotated[Path | None, typer.Option(help="YAML or JSON of accelerators over the built-in table: name → figures and source")]
HourPrice = Annotated[float, typer.Option(min=0, help="USD of one accelerator-hour: yours, there is no default price")]
Json = Annotated[bool, typer.Option("--json", help="print JSON, one object a line")]


@commands.command("plan")
def plan_layout(
    model: Model = "kimi-k3",
    accelerator: Name = None,
    count: Count = 8,
    node_size: NodeSize = 8,
    tp: Width = None,
    context: Context = 131_072,
    prompt: Prompt = 8_192,
    forks: Annotated[int, typer.Option(min=0, help="forks of each session")] = 0,
    sessions: Annotated[int, typer.Option(min=1, help="sessions that must be live at once")] = 1,
    output_rate: OutputRate = 10.0,
    latent_bytes: LatentBytes = 2,
    compute_bytes: Annotated[int, typer.Option(help="bytes of a dense weight at work: 2 (bf16) or 4 (float32, as on a CPU)")] = 2,
    load_rate: Annotated[float, typer.Option(help="GB/s that a node reads of the checkpoint")] = 10.0,
    max_running: Annotated[int, typer.Option(min=1, help="rows of a data-parallel group in one step")] = 64,
    memory_share: Annotated[float, typer.Option(help="share of an accelerator's memory that may be used")] = 0.9,
    reserve_gb: Annotated[float, typer.Option(min=0, help="GB an accelerator for collectives, graphs and libraries")] = RESERVE_GB,
    host_gb: Annotated[float, typer.Option(min=0, help="GB of a node's host memory for states at rest")] = 0.0,
    accelerators: Table = None,
    usd_per_hour: HourPrice = 0.0,
    as_json: Json = False,
) -> None:
    """Does the model fit, how is it laid out, what does it hold, how fast could it be? Rates are rooflines at stated efficiencies.

    Examples: `k3 plan` (the smallest layouts of the released Kimi K3) · `k3 plan --accelerator B300 --sessions 10 --usd-per-hour 5`
    """
    with clear_errors():
        config = _model(model)
        table = read_accelerators(accelerators) if accelerators else ACCELERATORS
        workload = Workload(
            context=context,
            prompt=min(prompt, context),
            forks=forks,
            sessions=sessions,
            output_rate=output_rate,
            max_running=max_running,
            latent_bytes=latent_bytes,
            compute_bytes=compute_bytes,
            memory_share=memory_share,
            reserve=round(reserve_gb * 1e9),
            host_bytes=host_gb * 1e9,
            load_rate=load_rate * 1e9,
        )
        if accelerator is None:
            found = smallest_layouts(config, table, workload, node_size=node_size)
            print_table(_smallest_title(node_size, workload), SMALLEST, [_smallest(p) for p in found], as_json=as_json)
            return
        row = _row(table, accelerator)
        planned = plan(config, accelerator, row, count, node_size=node_size, tp=tp, workload=workload)
        instead = [] if planned.fits else smallest_layouts(config, table, workload, node_size=node_size)
    figures = _figures(planned, row, workload, usd_per_hour)
    if as_json:
        if instead:
            figures["smallest_layouts"] = [dict(zip(SMALLEST, _smallest(p), strict=True)) for p in instead]
        print_table("", list(figures), [list(figures.values())], as_json=True)
    else:
        told = {name: value for name, value in figures.items() if value is not None}
        words = [(name, f"{v:,}" if isinstance(v, int) and not isinstance(v, bool) else str(v)) for name, v in told.items()]
        print_table(f"{count}x{accelerator}", ("figure", "value"), words, as_json=False)
        if instead:
            print_table(f"what holds it: {_smallest_title(node_size, workload)}", SMALLEST, [_smallest(p) for p in instead], as_json=False)
        elif planned.fits:
            print(_assumptions(workload))
    if not planned.fits:
        raise typer.Exit(1)


@commands.command("cost")
def compare_cost(
    accelerator: Annotated[str, typer.Option(help="row of the accelerator table")],
    usd_per_hour: Annotated[float, typer.Option(min=0, help="USD of one accelerator-hour")],
    model: Model = "kimi-k3",
    count: Count = 8,
    node_size: NodeSize = 8,
    tp: Width = None,
    context: Context = 131_072,
    prompt: Annotated[int, typer.Option(min=1, help="prompt tokens of a turn, cached ones included")] = 32_768,
    completion: Annotated[int, typer.Option(min=1, help="generated tokens of a turn")] = 1_024,
    cached: Annotated[float, typer.Option(min=0, max=1, help="share of prompt tokens that the prefix cache serves")] = 0.9,
    stored_gb: Annotated[float, typer.Option(min=0, help="GB of sessions at rest")] = 0.0,
    usd_per_gb_month: Annotated[float, typer.Option(min=0, help="USD of a stored GB and month")] = 0.0,
    output_rate: OutputRate = 10.0,
    latent_bytes: LatentBytes = 2,
    accelerators: Table = None,
    as_json: Json = False,
) -> None:
    """From which utilisation on are your accelerators cheaper than the hosted API? Speeds are the planner's, not measured.

    Example: `k3 cost --accelerator B300 --usd-per-hour 5`
    """
    with clear_errors():
        config = _model(model)
        row = _row(read_accelerators(accelerators) if accelerators else ACCELERATORS, accelerator)
        turn = Turn(prompt_tokens=prompt, cached_tokens=round(prompt * cached), completion_tokens=completion)
        computed = max(1, prompt - turn.cached_tokens)
        workload = Workload(context=context, prompt=min(computed, context), output_rate=output_rate, latent_bytes=latent_bytes)
        planned = plan(config, accelerator, row, count, node_size=node_size, tp=tp, workload=workload)
        if planned.reason is not None:
            raise ConfigError(planned.reason)
        machine = Machine(
            usd_per_hour=count * usd_per_hour,
            prompt_per_s=planned.prompt_per_s,
            completion_per_s=planned.tokens_per_s,
            stored_gb=stored_gb,
            usd_per_gb_month=usd_per_gb_month,
        )
    full = machine.usd_per_turn(turn, 1.0)
    shares = {name: machine.break_even(turn, price) for name, price in LIST_PRICES.items()}
    if as_json:
        columns: tuple[str, ...] = ("against", "api_usd_per_turn", "own_usd_per_turn", "break_even_utilisation", "turns_per_hour")
        told = [(n, turn.api_usd(p), full, shares[n], machine.turns_per_hour(turn)) for n, p in LIST_PRICES.items()]
        print_table("", columns, told, as_json=True)
        return
    columns = ("against the list price of", "API $/turn", "own $/turn at 100%", "cheaper from utilisation")
    words = {n: f"{share:.0%}" if share <= 1 else f"never: {share:.2f} of its capacity" for n, share in shares.items()}
    rows = [(n, turn.api_usd(p), full, words[n]) for n, p in LIST_PRICES.items()]
    print_table(f"{count}x{accelerator}: {machine.turns_per_hour(turn):,.0f} turns an hour at most", columns, rows, as_json=False)
    for name, price in LIST_PRICES.items():
        print(f"\n$ a turn by utilisation, against {name}\n{chart(machine, turn, price)}")


def _row(table: Mapping[str, Accelerator], name: str) -> Accelerator:
    if name not in table:
        raise ConfigError(f"accelerator {name!r} is not in the table: {', '.join(table)}; add it with --accelerators FILE")
    return table[name]


def _model(name: str) -> ModelConfig:
    return RELEASED.get(name) or ModelConfig.from_dir(name)


def _smallest(p: ClusterPlan) -> tuple[str, int, int, int, int]:
    return p.accelerator, p.count, p.tp, p.live_sessions, p.max_context


def _smallest_title(node_size: int, workload: Workload) -> str:
    rate = f"{workload.output_rate:g} tokens a second each"
    return f"the smallest layouts in nodes of {node_size}, {workload.context:,} tokens a session, {rate}"


def _assumptions(workload: Workload) -> str:
    """Why the pools are as large as they are, in words."""
    gap = peer_gap()
    return (
        f"Pools are what is left of {workload.memory_share:.0%} of the memory after weights, activations of a step of "
        f"{workload.max_batched_tokens:,} tokens\nand {workload.reserve / 1e9:.3g} GB of reserve. A public vLLM run on 8xB300, tp 8, had "
        f"{PEER_POOL / 2**30:.2f} GiB a GPU, {gap / 2**30:.1f} GiB less than this rule leaves there:\nCUDA graphs, larger steps and the "
        f"vision tower may explain it, nothing was published. --reserve-gb {(Workload().reserve + gap) / 1e9:.4g} plans with its pool."
    )


def _figures(p: ClusterPlan, row: Accelerator, workload: Workload, usd_per_hour: float) -> dict[str, Any]:
    """Names say the unit; bytes, pages and slots are of one accelerator, rates and sessions of the replica."""
    figures: dict[str, Any] = {"fits": p.fits, "reason": p.reason, "source": row.source, "tp": p.tp, "dp": p.groups, "ep": p.ep}
    figures |= {f"{name}_bytes": size for name, size in p.weights.items()}
    figures |= {"weight_bytes": p.weight_bytes, "workspace_bytes": p.workspace, "left_for_pools_bytes": p.pool}
    figures |= {"kept_free_bytes": round(row.memory * (1 - workload.memory_share)), "memory_bytes": round(row.memory)}
    if p.pools is None:
        return figures
    figures |= {
        "pages": p.pools.num_pages,
        "slots": p.pools.num_slots,
        "group_pool_tokens": p.pool_tokens,
        "max_context": p.max_context,
        "live_sessions": p.live_sessions,
        "generating_sessions": p.rows,
        "host_sessions": p.host_sessions,
        "load_s": round(p.load_s, 1),
        "time_to_first_token_s": round(p.ttft_s, 3),
        "decode_step_s": round(p.step_s, 4),
        "generated_tokens_per_s": round(p.tokens_per_s),
        "prompt_tokens_per_s": round(p.prompt_per_s),
    }
    if usd_per_hour:
        figures["usd_per_million_generated"] = round(p.usd_per_million(usd_per_hour), 2)
    return figures
