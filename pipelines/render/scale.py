"""The load of a job as text: its shards on Spanner, and the estimate of what a stated load needs.

The figures are those of `pipelines.scale.scale`, which ``--json`` prints.
"""

from typing import Any

from dpstream.pipelines.render.layout import each, labelled, page


def shards_lines(state: dict[str, int]) -> list[str]:
    """Return how many changed keys a step commits at once; nothing without a Spanner store.

    Args:
        state: `scale.shard_figures`.
    """
    if not state:
        return []
    shards, most = state["shards"], state["keys_of_a_commit"]
    head = f"Spanner, {shards} key shards: a step of up to {most:,} changed keys is one"
    if "shards_needed" not in state:
        return labelled(
            "State",
            head,
            "commit, a larger one is committed in parts, by key. `--changed-keys N` says",
            "how many shards a trigger with N changed keys needs to avoid that.",
        )
    needed = state["shards_needed"]
    verdict = "enough here" if shards >= needed else f"set shards = {needed}"
    changed = f"{state['changed_keys']:,} changed keys a trigger need {needed:,} shards: {verdict}."
    return labelled("State", head, f"commit; {changed}")


def scale_text(scale: dict[str, Any]) -> str:
    """Return an estimate with the figures that it rests on.

    Args:
        scale: `scale.as_dict`.
    """
    estimate, load = scale["estimate"], scale["load"]
    spanner = estimate["store"] == "spanner"
    busy = ", ".join(f"{name.replace('_', ' ')} {n:.1f}" for name, n in estimate["vcpus"].items())
    lines = [
        *labelled(
            "Scale",
            f"an estimate for {load['keys']:,} keys and {load['records_per_day']:,} records a day, "
            f"a trigger every {estimate['interval']:g} s,",
            f"{load['peak']:g} times the load at the busiest one",
        ),
        *labelled(
            "A trigger",
            f"{estimate['records']:,} rows, up to {estimate['keys_changed']:,} keys and "
            f"{estimate['units_changed']:,} units change,",
            f"up to {estimate['keys_published']:,} keys are published",
        ),
        *labelled(
            "Shards",
            f"{estimate['shards']:,}: {estimate['rows_a_step']:,} rows a step"
            + (", one commit each" if spanner else ""),
        ),
        *labelled(
            "Writes",
            f"{estimate['key_writes']:,} key rows/s and {estimate['unit_writes']:,} unit rows/s; "
            f"{estimate['peak_writes']:,}/s at the peak, done in {estimate['within']:g} s",
        ),
        *labelled("Cores", f"{sum(estimate['vcpus'].values()):.1f} busy at the peak ({busy})"),
        *_hardware(estimate, load),
        *each("Warning", estimate["warnings"]),
        *each(
            "From",
            (
                f"{name} {f['value']:,g} {f['unit']} ({f['kind']}: {f['source']})"
                for name, f in scale["figures"].items()
                if spanner or f["kind"] == "measured"  # others are of a cluster
            ),
        ),
    ]
    return page(lines)


def _hardware(estimate: dict[str, Any], load: dict[str, Any]) -> list[str]:
    """The cluster, or the disk of the one machine."""
    if estimate["store"] != "spanner":
        return labelled("SQLite", f"{estimate['state_gib']:,.2f} GiB on disk, one machine")
    cost = estimate["cost"]
    workers = cost["worker_vcpus"] + cost["worker_memory"]
    spanner = cost["spanner_nodes"] + cost["spanner_storage"]
    size = f"{load['worker_vcpus']} vCPUs and {load['worker_gib']:g} GB"
    return [
        *labelled("Workers", f"{estimate['workers']:,} of {size}"),
        *labelled("Spanner", f"{estimate['nodes']:,} nodes, {estimate['state_gib']:,.1f} GiB"),
        *labelled(
            "Cost",
            f"${cost['total']:,.0f} a month: workers ${workers:,.0f}, Spanner ${spanner:,.0f}",
        ),
    ]
