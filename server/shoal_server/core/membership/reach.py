"""Members that cannot reach each other: whom to leave out so that the rest can train."""

from collections.abc import Mapping, Sequence


def whom_to_exclude(
    unreachable: Mapping[str, Mapping[str, str]], *, newest_last: Sequence[str], kept: set[str]
) -> dict[str, str]:
    """Who is to go, each with what was seen, so that all who are left reach one another.

    `unreachable` says for each member which peers it could not reach, and how that showed. A pair
    is cut if either side says so, since a collective needs both ways. One who is cut off from
    many goes before many who are each cut off from one; between equals the newest goes. Who is in
    `kept` trains, and stays whatever newcomers say.
    """
    cut: dict[str, dict[str, str]] = {}
    for member, peers in unreachable.items():
        for peer, seen in peers.items():
            cut.setdefault(member, {})[peer] = f"{member} could not reach {peer}: {seen}"
            cut.setdefault(peer, {}).setdefault(member, f"{member} could not reach {peer}: {seen}")
    order = {member: position for position, member in enumerate(newest_last)}
    excluded: dict[str, str] = {}
    while any(cut.values()):
        # Two who both train reached each other a moment ago; their break, if any, will tell.
        able = [m for m, peers in cut.items() if peers and m not in kept]
        if not able:
            break
        worst = max(able, key=lambda m: (len(cut[m]), order.get(m, -1)))
        excluded[worst] = "; ".join(cut[worst][peer] for peer in sorted(cut[worst])[:5])
        for peer in cut.pop(worst):
            cut[peer].pop(worst)
    return excluded
