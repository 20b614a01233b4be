"""The pictures of docs/how-it-works.md, drawn as SVG: `python docs/pictures.py` writes them to docs/img/.

Plain text, no font and no clock in it: the same script gives the same bytes everywhere. Backgrounds are transparent and
colours of medium lightness, so that they can be read on light and dark pages; small text stands on filled boxes.
"""

from pathlib import Path

import numpy as np

from semmoe.costs.metrics import layer_traffic

BLUE, ORANGE, GREY, GREEN, RED = "#2f6fb3", "#c4661f", "#858b96", "#2e8b57", "#c8434b"
KIND = (BLUE, ORANGE)

# The worked example of `make reproduce ITEMS=figure3`: tokens of kind 0 choose experts 0 and 2, the others 1 and 3.
KINDS = np.array([0, 1, 0, 1, 0, 1, 0, 1])
CHOICES = np.array([[0, 2], [1, 3]])
IN_TURN = np.arange(8) // 4
WAYS = (
    ("as they come", IN_TURN, (0, 1, 2, 3)), ("tokens moved", KINDS, (0, 1, 2, 3)),
    ("experts moved", IN_TURN, (0, 2, 1, 3)), ("both moved", KINDS, (0, 2, 1, 3)),
)  # fmt: skip


class Drawing:
    """An SVG that grows by shapes; units are pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="Helvetica, Arial, sans-serif" role="img">\n<title>{title}</title>\n'
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="context-stroke"/></marker></defs>\n'
        )
        self._shapes: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, fill: str, text: str = "", size: int = 14) -> None:
        """A filled box with white text in its middle."""
        self._shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4" fill="{fill}"/>')
        if text:
            self.text(x + w / 2, y + h / 2 + 0.35 * size, text, size, "#fff", "middle", bold=True)

    def frame(self, x: float, y: float, w: float, h: float, text: str = "") -> None:
        """An outline with a name on top of it."""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="8" fill="{GREY}" fill-opacity="0.1" '
            f'stroke="{GREY}" stroke-width="1.5"/>'
        )
        if text:
            self.text(x + w / 2, y - 7, text, 14, GREY, "middle", bold=True)

    def text(
        self, x: float, y: float, text: str, size: int = 15, fill: str = GREY, anchor: str = "start", bold: bool = False
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        place = f'x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
        self._shapes.append(f"<text {place}{weight}>{text}</text>")

    def arrow(self, x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 2) -> None:
        self._shapes.append(
            f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{stroke}" stroke-width="{width:g}" fill="none" '
            'marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        return self._head + "\n".join(self._shapes) + "\n</svg>\n"


def logo() -> Drawing:
    """Two ranks whose tokens are of one kind each."""
    drawing = Drawing(32, 32, "semmoe")
    for x, kind in ((3, 0), (18, 1)):
        for y in (3, 18):
            drawing.box(x, y, 11, 11, ("#7fb2e6", "#f0a368")[kind])
    return drawing


def two_exchanges() -> Drawing:
    """One MoE layer: rows leave for the ranks of their experts, and results come back."""
    drawing = Drawing(760, 330, "Dispatch takes rows to experts on other ranks, combine brings results back")
    columns, ranks = ((40, "router"), (320, "experts"), (600, "sum")), (0, 1, 2)
    for x, name in columns:
        drawing.text(x + 60, 22, name, 15, GREY, "middle", bold=True)
    for rank in ranks:
        y = 40 + 95 * rank
        for x, name in columns:
            drawing.frame(x, y, 120, 70)
            middle = f"experts {2 * rank}, {2 * rank + 1}" if name == "experts" else f"rank {rank}’s tokens"
            drawing.box(x + 8, y + 20, 104, 30, GREEN if name == "experts" else BLUE, middle, 11)
    for a in ranks:
        for b in ranks:
            colour, width = (GREEN, 3.5) if a == b else (RED, 1.8)
            drawing.arrow(164, 67 + 95 * a + 8 * (b - 1), 314, 67 + 95 * b + 8 * (a - 1), colour, width)
            drawing.arrow(444, 67 + 95 * a + 8 * (b - 1), 594, 67 + 95 * b + 8 * (a - 1), colour, width)
    drawing.text(239, 322, "dispatch", 16, RED, "middle", bold=True)
    drawing.text(519, 322, "combine", 16, RED, "middle", bold=True)
    return drawing


def requests_to_ranks() -> Drawing:
    """attention-DP: what moves is the request, before any of its tokens is computed."""
    drawing = Drawing(760, 300, "attention-DP: each request goes to the rank whose experts it will use")
    kinds, shown = (0, 1, 1, 0), ("prime numbers", "a sales contract", "a court ruling", "a proof")
    rows = sorted(range(4), key=lambda r: (kinds[r], r))
    for request, (kind, words) in enumerate(zip(kinds, shown, strict=True)):
        y, target = 34 + 62 * request, 34 + 62 * rows.index(request) + (20 if rows.index(request) > 1 else 0)
        drawing.box(10, y, 180, 40, KIND[kind], f"“{words}”", 14)
        drawing.arrow(196, y + 20, 304, y + 20, KIND[kind])
        drawing.arrow(436, y + 20, 534, target + 20, KIND[kind])
        drawing.box(548, target, 92, 40, KIND[kind], f"request {request}", 13)
    drawing.box(310, 24, 122, 246, "#6b7280", "", 14)
    for line, word in enumerate(("a score for", "each rank by", "the prompt’s", "token ids, and", "its load")):
        drawing.text(371, 108 + 22 * line, word, 14, "#fff", "middle", bold=True)
    for rank, y in ((0, 22), (1, 166)):
        drawing.frame(540, y, 210, 126, "")
        drawing.box(652, y + 12, 88, 102, GREEN, "", 13)
        drawing.text(696, y + 58, f"rank {rank}", 14, "#fff", "middle", bold=True)
        drawing.text(696, y + 78, "its experts", 13, "#fff", "middle")
    drawing.text(100, 20, "requests", 15, GREY, "middle", bold=True)
    return drawing


def tokens_to_ranks() -> Drawing:
    """attention-TP: the reduce-scatter after attention leaves each token on the rank that hosts its experts."""
    drawing = Drawing(760, 330, "attention-TP: shuffled reduce-scatter, experts, shuffled all-gather")
    shuffled = np.argsort(KINDS, kind="stable")
    for x, name in ((10, "attention"), (250, "own slice"), (400, "experts"), (560, "next attention")):
        width = {10: 130, 250: 110, 400: 110, 560: 130}[x]
        for rank in (0, 1):
            drawing.frame(x, 44 + 140 * rank, width, 120, name if rank == 0 else "")
    for rank in (0, 1):
        top = 44 + 140 * rank
        for position in range(8):
            for x in (20, 570):
                place = x + 28 * (position % 4), top + 24 + 38 * (position // 4)
                drawing.box(*place, 24, 30, KIND[KINDS[position]], str(position), 13)
        for place, token in enumerate(shuffled[4 * rank : 4 * rank + 4]):
            at = 264 + 44 * (place % 2), top + 24 + 38 * (place // 2)
            drawing.box(*at, 36, 30, KIND[KINDS[token]], str(token), 13)
        drawing.box(410, top + 30, 90, 60, GREEN, f"experts {CHOICES[rank][0]}, {CHOICES[rank][1]}", 12)
        drawing.arrow(360, top + 60, 398, top + 60, GREEN, 3.5)
        drawing.arrow(144, top + 60, 244, top + 60, GREY, 3.5)
        drawing.arrow(144, top + 60, 244, top + 60 + 140 * (1 - 2 * rank), GREY, 1.8)
        drawing.arrow(514, top + 60, 554, top + 60, GREY, 3.5)
        drawing.arrow(514, top + 60, 554, top + 60 + 140 * (1 - 2 * rank), GREY, 1.8)
        drawing.text(726, top + 66, f"rank {rank}", 14, GREY, "middle", bold=True)
    drawing.text(194, 324, "shuffled reduce-scatter", 14, GREY, "middle", bold=True)
    drawing.text(534, 324, "shuffled all-gather", 14, GREY, "middle", bold=True)
    return drawing


def remote_tokens(home: np.ndarray, held: tuple[int, ...]) -> tuple[int, float]:
    """Rows that cross in dispatch and combine, and LAR, of the worked example."""
    rank_of = np.argsort(held) // 2
    traffic = layer_traffic(rank_of[CHOICES[KINDS]], home, 2)
    return 2 * int(traffic.rows.sum()), traffic.lar


def worked_example() -> Drawing:
    """Eight tokens of two kinds, four experts, two ranks, in four ways."""
    drawing = Drawing(760, 600, "Eight tokens of two kinds on two ranks: tokens that cross, four ways")
    for panel, (name, home, held) in enumerate(WAYS):
        x, y = 10 + 380 * (panel % 2), 34 + 300 * (panel // 2)
        crossing, lar = remote_tokens(home, held)
        drawing.text(x + 175, y - 10, name, 16, GREY, "middle", bold=True)
        for rank in (0, 1):
            _rank_of_example(drawing, x + 186 * rank, y, rank, home, held)
        colour = RED if crossing else GREEN
        drawing.text(x + 175, y + 238, f"{crossing} rows cross, LAR {lar:.2f}", 17, colour, "middle", bold=True)
    return drawing


def _rank_of_example(
    drawing: Drawing, x: float, y: float, rank: int, home: np.ndarray, held: tuple[int, ...]
) -> None:  # fmt: skip
    drawing.frame(x, y, 168, 212)
    drawing.text(x + 84, y + 20, f"rank {rank}", 14, GREY, "middle", bold=True)
    for place, token in enumerate(np.flatnonzero(home == rank)):
        drawing.box(x + 12 + 37 * place, y + 32, 33, 33, KIND[KINDS[token]], str(token), 14)
    for place, expert in enumerate(held[2 * rank : 2 * rank + 2]):
        left = x + 12 + 76 * place
        drawing.box(left, y + 136, 68, 60, KIND[0 if expert in CHOICES[0] else 1], f"expert {expert}", 13)
    for place, token in enumerate(np.flatnonzero(home == rank)):
        for expert in CHOICES[KINDS[token]]:
            _choice(drawing, x, y, rank, place, int(expert), held)


def _choice(
    drawing: Drawing, x: float, y: float, rank: int, place: int, expert: int, held: tuple[int, ...]
) -> None:  # fmt: skip
    """A line from a token to an expert that it chose."""
    slot = held.index(expert)
    end = x + 186 * (slot // 2 - rank) + 46 + 76 * (slot % 2)
    here = slot // 2 == rank
    drawing.arrow(x + 28 + 37 * place, y + 67, end, y + 132, GREEN if here else RED, 1.6 if here else 1.2)


def clustered() -> Drawing:
    """How often tokens choose experts, before and after both are put into the same order of groups."""
    drawing = Drawing(760, 330, "Token types against experts, in the order of their numbers and grouped by rank")
    rng = np.random.default_rng(3)
    token_rank, expert_rank = rng.permutation(np.arange(12) % 2), rng.permutation(np.arange(8) % 2)
    likely = np.where(token_rank[:, None] == expert_rank[None], 0.85, 0.18)
    weight = np.clip(likely + rng.uniform(-0.15, 0.15, likely.shape), 0.05, 1)
    orders = (
        (np.arange(12), np.arange(8)),
        (np.argsort(token_rank, kind="stable"), np.argsort(expert_rank, kind="stable")),
    )
    for x, (tokens, experts), name in zip((80, 460), orders, ("as numbered", "grouped by rank"), strict=True):
        drawing.text(x + 120, 22, f"experts, {name}", 15, GREY, "middle", bold=True)
        for row, token in enumerate(tokens):
            for column, expert in enumerate(experts):
                _cell(drawing, x + 30 * column, 34 + 23 * row, float(weight[token, expert]))
        drawing.text(x - 12, 180, "tokens", 15, GREY, "end", bold=True)
    for rank in (0, 1):
        drawing.frame(458 + 120 * rank, 32 + 138 * rank, 122, 140)
        drawing.text(708, 106 + 138 * rank, f"rank {rank}", 14, GREY, bold=True)
    drawing.arrow(330, 172, 366, 172, GREY, 3.5)
    return drawing


def _cell(drawing: Drawing, x: float, y: float, weight: float) -> None:
    drawing._shapes.append(
        f'<rect x="{x:g}" y="{y:g}" width="28" height="21" rx="2" fill="{BLUE}" fill-opacity="{weight:.2f}"/>'
    )


def equal_slices() -> Drawing:
    """Scores say five tokens for rank 0 and three for rank 1; slices hold four each, so the least sure one moves."""
    drawing = Drawing(760, 250, "Equal slices: the token that loses least goes to its second choice")
    local = ((1.9, 0.1), (0.2, 1.8), (1.6, 0.4), (0.3, 1.7), (1.8, 0.2), (1.1, 0.9), (1.7, 0.3), (0.4, 1.6))
    gain = np.array([a - b for a, b in local])
    first = np.argsort(-gain, kind="stable")[:4]
    home = np.where(np.isin(np.arange(8), first), 0, 1)
    drawing.text(10, 42, "token", 15, GREY, bold=True)
    for rank in (0, 1):
        drawing.text(10, 84 + 34 * rank, f"expected at home on rank {rank}", 14, GREY)
    drawing.text(10, 176, "slice of rank", 15, GREY, bold=True)
    for token, scores in enumerate(local):
        x, wanted = 250 + 62 * token, int(scores[1] > scores[0])
        drawing.box(x, 22, 50, 30, KIND[wanted], str(token), 14)
        for rank, score in enumerate(scores):
            drawing.text(x + 25, 84 + 34 * rank, f"{score:.1f}", 15, GREY, "middle", bold=rank == wanted)
        moved = int(home[token]) != wanted
        drawing.arrow(x + 25, 128, x + 25, 150, RED if moved else GREEN, 2.4)
        drawing.box(x, 156, 50, 30, KIND[int(home[token])], str(int(home[token])), 14)
    drawing.text(
        10, 222, "Token 5 expects 1.1 against 0.9: it loses least, so it fills rank 1’s slice.", 15, RED, bold=True
    )
    return drawing


PICTURES = {
    "logo": logo, "two-exchanges": two_exchanges, "attention-dp": requests_to_ranks, "attention-tp": tokens_to_ranks,
    "worked-example": worked_example, "clustered": clustered, "equal-slices": equal_slices,
}  # fmt: skip


def main(folder: Path = Path(__file__).parent / "img") -> None:
    folder.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
