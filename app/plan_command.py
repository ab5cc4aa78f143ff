"""`k3 plan` and `k3 cost`: the planner's and the break-even's figures as tables or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from app.terminal import clear_errors, print_table
from cluster.accelerators import ACCELERATORS, Accelerator, read_accelerators
from cluster.cost import LIST_PRICES, Machine, Turn, chart
from cluster.planner import ClusterPlan, Workload, plan, smallest_layouts
from engine.errors import ConfigError
from model.config import ModelConfig

commands = typer.Typer()

Model = Annotated[Path, typer.Option(help="directory with the checkpoint's config.json; the weights are not read")]
Name = Annotated[str | None, typer.Option(help="row of the accelerator table; none = the smallest layout of each that fits")]
Count = Annotated[int, typer.Option(min=1, help="accelerators of a replica")]
NodeSize = Annotated[int, typer.Option(min=1, help="accelerators of a node")]
Width = Annotated[int | None, typer.Option(min=1, help="tensor-parallel width; none = the one that holds most sessions")]
Context = Annotated[int, typer.Option(min=1, help="tokens of a live session")]
Prompt = Annotated[int, typer.Option(min=1, help="new tokens of a turn")]
LatentBytes = Annotated[int, typer.Option(help="bytes of a latent's element: 2 (bf16) or 1 (fp8)")]
Table = Annotated[Path | None, typer.Option(help="YAML or JSON of accelerators over the built-in table: name → figures and source")]
HourPrice = Annotated[float, typer.Option(min=0, help="USD of one accelerator-hour: yours, there is no default price")]
Json = Annotated[bool, typer.Option("--json", help="print JSON, one object a line")]


@commands.command("plan")
def plan_layout(
    model: Model,
    accelerator: Name = None,
    count: Count = 8,
    node_size: NodeSize = 8,
    tp: Width = None,
    context: Context = 131_072,
    prompt: Prompt = 8_192,
    forks: Annotated[int, typer.Option(min=0, help="forks of each session")] = 0,
    latent_bytes: LatentBytes = 2,
    load_rate: Annotated[float, typer.Option(help="GB/s that a node reads of the checkpoint")] = 10.0,
    max_running: Annotated[int, typer.Option(min=1, help="rows of a data-parallel group in one step")] = 64,
    memory_share: Annotated[float, typer.Option(help="share of an accelerator's memory that may be used")] = 0.9,
    host_gb: Annotated[float, typer.Option(min=0, help="GB of a node's host memory for states at rest")] = 0.0,
    accelerators: Table = None,
    usd_per_hour: HourPrice = 0.0,
    as_json: Json = False,
) -> None:
    """Does the model fit, how is it laid out, what does it hold, how fast could it be? Rates are rooflines at stated efficiencies.

    Example: `k3 plan --model /data/kimi-k3 --accelerator B300 --count 8`
    """
    with clear_errors():
        config = ModelConfig.from_dir(model)
        table = read_accelerators(accelerators) if accelerators else ACCELERATORS
        workload = Workload(
            context=context,
            prompt=min(prompt, context),
            forks=forks,
            max_running=max_running,
            latent_bytes=latent_bytes,
            memory_share=memory_share,
            host_bytes=host_gb * 1e9,
            load_rate=load_rate * 1e9,
        )
        if accelerator is None:
            found = smallest_layouts(config, table, workload, node_size=node_size)
            columns = ("accelerator", "count", "tp", "live_sessions", "max_context")
            rows = [(p.accelerator, p.count, p.tp, p.live_sessions, p.max_context) for p in found]
            print_table(f"smallest layouts in nodes of {node_size}, {context:,} tokens a session", columns, rows, as_json=as_json)
            return
        row = _row(table, accelerator)
        planned = plan(config, accelerator, row, count, node_size=node_size, tp=tp, workload=workload)
    figures = _figures(planned, row, usd_per_hour)
    if as_json:
        print_table("", list(figures), [list(figures.values())], as_json=True)
    else:
        told = {name: value for name, value in figures.items() if value is not None}
        words = [(name, f"{v:,}" if isinstance(v, int) and not isinstance(v, bool) else str(v)) for name, v in told.items()]
        print_table(f"{count}x{accelerator}", ("figure", "value"), words, as_json=False)
    if not planned.fits:
        raise typer.Exit(1)


@commands.command("cost")
def compare_cost(
    model: Model,
    accelerator: Annotated[str, typer.Option(help="row of the accelerator table")],
    usd_per_hour: Annotated[float, typer.Option(min=0, help="USD of one accelerator-hour")],
    count: Count = 8,
    node_size: NodeSize = 8,
    tp: Width = None,
    context: Context = 131_072,
    prompt: Annotated[int, typer.Option(min=1, help="prompt tokens of a turn, cached ones included")] = 32_768,
    completion: Annotated[int, typer.Option(min=1, help="generated tokens of a turn")] = 1_024,
    cached: Annotated[float, typer.Option(min=0, max=1, help="share of prompt tokens that the prefix cache serves")] = 0.9,
    stored_gb: Annotated[float, typer.Option(min=0, help="GB of sessions at rest")] = 0.0,
    usd_per_gb_month: Annotated[float, typer.Option(min=0, help="USD of a stored GB and month")] = 0.0,
    latent_bytes: LatentBytes = 2,
    accelerators: Table = None,
    as_json: Json = False,
) -> None:
    """From which utilisation on are your accelerators cheaper than the hosted API? Speeds are the planner's, not measured.

    Example: `k3 cost --model /data/kimi-k3 --accelerator B300 --usd-per-hour 5`
    """
    with clear_errors():
        config = ModelConfig.from_dir(model)
        row = _row(read_accelerators(accelerators) if accelerators else ACCELERATORS, accelerator)
        turn = Turn(prompt_tokens=prompt, cached_tokens=round(prompt * cached), completion_tokens=completion)
        computed = max(1, prompt - turn.cached_tokens)
        workload = Workload(context=context, prompt=min(computed, context), latent_bytes=latent_bytes)
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


def _figures(p: ClusterPlan, row: Accelerator, usd_per_hour: float) -> dict[str, Any]:
    """Names say the unit; bytes, pages and slots are of one accelerator, rates and sessions of the replica."""
    figures: dict[str, Any] = {"fits": p.fits, "reason": p.reason, "source": row.source, "tp": p.tp, "dp": p.groups, "ep": p.ep}
    figures |= {f"{name}_bytes": size for name, size in p.weights.items()}
    figures |= {"weight_bytes": p.weight_bytes, "workspace_bytes": p.workspace, "left_for_pools_bytes": p.pool}
    if p.pools is None:
        return figures
    figures |= {
        "pages": p.pools.num_pages,
        "slots": p.pools.num_slots,
        "group_pool_tokens": p.pool_tokens,
        "max_context": p.max_context,
        "live_sessions": p.live_sessions,
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
