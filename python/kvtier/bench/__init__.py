"""What kvtier's parts measure on this machine, beside the fastest plain way of doing the same.

One module a question (`kvtier.bench.transfer`: tensors to slots and back), each with
`measure(*, rounds, ...)`, which yields one `Figure` after the other as they are taken. The flags
of `kvtier bench QUESTION` are the other arguments; `kvtier.cli.bench.QUESTIONS` declares them, so
that this package is only imported to measure.

A figure is the median of several rounds. What it is compared with is measured in the same
rounds, turn by turn, and the ratio is the median of the rounds' ratios: a slow moment of the
machine then slows both.
"""

from kvtier.bench.figures import Figure, alternate, compared, untaken

__all__ = ["Figure", "alternate", "compared", "untaken"]
