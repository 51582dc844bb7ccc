"""The codec of each saved tensor under each policy, by module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cswap.experiments.accuracy.train import Trained

MIB = 1 << 20
KEPT = "kept"


def choices(replicas: Mapping[str, Trained]) -> dict[str, list[dict[str, Any]]]:
    """By policy, the saved tensors of a step with the codec that took most of their encodings.

    Call it before `Trained.finish`. Tensors whose values were never sampled are left out, such as
    small ones.
    """
    found = {}
    for policy, replica in replicas.items():
        if replica.handle is None:
            continue
        replica.handle.engine.synchronize()
        rows = []
        for one in replica.handle.engine.explain():
            used = max(one.measured, key=lambda m: m.count, default=None)
            if one.profile is not None:
                rows.append(
                    {
                        "position": one.position,
                        "module": one.site.scope,
                        "kind": one.site.kind,
                        "bytes": one.profile.nbytes,
                        "codec": used.codec if used else KEPT,
                        "ratio": used.ratio if used else 1.0,
                    }
                )
        found[policy] = rows
    return found


def headings(by_policy: Mapping[str, list[dict[str, Any]]]) -> tuple[str, ...]:
    """Headings of `rows`."""
    return ("saved in", "MiB", *by_policy)


def rows(by_policy: Mapping[str, list[dict[str, Any]]]) -> Iterator[tuple[str, ...]]:
    """A row per saved tensor: its module, its size, and codec and ratio under each policy."""
    cells: dict[int, dict[str, str]] = {}
    places: dict[int, tuple[str, str]] = {}
    for policy, tensors in by_policy.items():
        for one in tensors:
            place = " ".join(filter(None, (one["module"], f"({one['kind']})")))
            places[one["position"]] = (place, f"{one['bytes'] / MIB:.2f}")
            word = one["codec"] if one["codec"] == KEPT else f"{one['codec']} {one['ratio']:.1f}"
            cells.setdefault(one["position"], {})[policy] = word
    for position in sorted(cells):
        yield (*places[position], *(cells[position].get(policy, "") for policy in by_policy))
