"""Choice of the members to leave out if some cannot reach each other."""

from collections.abc import Mapping, Sequence


def members_to_exclude(
    unreachable: Mapping[str, Mapping[str, str]], *, newest_last: Sequence[str], kept: set[str]
) -> dict[str, str]:
    """Members to exclude so that all others reach each other, each with up to five errors seen.

    `unreachable`: for each member the peers that it could not reach, with the errors. A pair is cut
    if either side reports it, since a collective needs both directions. The member that is cut off
    from most others is excluded first; of equals, the last in `newest_last`. Members in `kept` are
    never excluded, even if they do not reach each other.
    """
    cut: dict[str, dict[str, str]] = {}
    for member, peers in unreachable.items():
        for peer, seen in peers.items():
            cut.setdefault(member, {})[peer] = f"{member} could not reach {peer}: {seen}"
            cut.setdefault(peer, {}).setdefault(member, f"{member} could not reach {peer}: {seen}")
    order = {member: position for position, member in enumerate(newest_last)}
    excluded: dict[str, str] = {}
    while any(cut.values()):
        # Two kept members reached each other before; if they cannot now, their generation breaks.
        able = [m for m, peers in cut.items() if peers and m not in kept]
        if not able:
            break
        worst = max(able, key=lambda m: (len(cut[m]), order.get(m, -1)))
        excluded[worst] = "; ".join(cut[worst][peer] for peer in sorted(cut[worst])[:5])
        for peer in cut.pop(worst):
            cut[peer].pop(worst)
    return excluded
