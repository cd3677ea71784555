"""Which operation a product of global arrays is: a table, without arrays and devices."""

import pytest

from jaxtaxfree.sharded.plan import Plan, Sharded, plan

MESH = {"data": 2, "tp": 4, "ep": 2}
LENGTH = 16  # of every dimension but those of 0 or 3, "e" and "o"


def array(text: str) -> Sharded:
    """Such as "b@data t d@tp,ep"."""
    parts = [part.partition("@") for part in text.split()]
    return Sharded(tuple(x for x, *_ in parts), tuple(tuple(filter(None, axes.split(","))) for *_, axes in parts))


def planned(text: str, epilogue: tuple[str, ...] = ()) -> Plan | list[str]:
    """The plan of "lhs; rhs; result"."""
    lhs, rhs, out = map(array, text.split(";"))
    lengths = {label: {"e": 0, "o": 3}.get(label, LENGTH) for each in (lhs, rhs, out) for label in each.labels}
    return plan(lhs, rhs, out, lengths, MESH, epilogue)


def described(found: Plan | list[str]) -> str:
    """The operation, its axes, what it moves, and how the weights come."""
    assert isinstance(found, Plan), found
    words = [found.operation or "local", ",".join(found.axes), found.moved or ""]
    words += ["swapped"] if found.swapped else []
    words += [found.layout] if found.layout != "KN" else []
    words += [f"gathers {label} along {','.join(axes)}" for label, axes in found.gathered]
    words += [f"after {','.join(found.before)}"] if found.before else []
    return " ".join(filter(None, words))


@pytest.mark.parametrize(
    ("product", "wanted"),
    (
        # Contracted dimensions that both have sharded: sums.
        ("m k@tp; k@tp n; m n", "matmul_all_reduce tp"),
        ("b@data t k@tp; k@tp n; b@data t n", "matmul_all_reduce tp"),
        ("k@tp; k@tp n; n", "matmul_all_reduce tp"),
        ("m k@tp,ep; k@tp,ep n; m n", "matmul_all_reduce tp,ep"),
        ("m k@tp l@ep; k@tp l@ep n; m n", "matmul_all_reduce tp,ep"),
        ("b t n@tp h; n@tp h d; b t d", "matmul_all_reduce tp"),
        ("b n@tp t h; n@tp h d; b t d", "matmul_all_reduce tp"),
        ("m k@tp; k@tp n@ep; m n@ep", "matmul_all_reduce tp"),
        ("m k@tp; k@tp n; m@tp n", "matmul_reduce_scatter tp m"),
        ("b@data t k@tp; k@tp n; b@data t@tp n", "matmul_reduce_scatter tp t"),
        ("b@data t k@tp; k@tp n; b@data,tp t n", "matmul_reduce_scatter tp b"),
        ("m k@tp,ep; k@tp,ep n; m@ep,tp n", "matmul_reduce_scatter ep,tp m"),
        ("b t k@tp; n k@tp; b t@tp n", "matmul_reduce_scatter tp t NK"),
        ("b t n@tp h; n@tp h d; b t d@tp", "matmul_reduce_scatter tp d"),
        ("b t k@tp; n k@tp; b t n", "matmul_all_reduce tp NK"),
        # Each rank takes its part of weights that are whole.
        ("m k@tp; k n; m n", "matmul_all_reduce tp"),
        ("b@data t k@tp,ep; k n; b@data t n", "matmul_all_reduce tp,ep"),
        ("m k@tp; k n; m@tp n", "matmul_reduce_scatter tp m"),
        # A row, and the columns: a gather.
        ("m@tp k; k n@tp; m n@tp", "all_gather_matmul tp m"),
        ("b@data t@tp d; d n@tp h; b@data t n@tp h", "all_gather_matmul tp t"),
        ("b@data,tp t d; d f@tp; b@data t f@tp", "all_gather_matmul tp b"),
        ("b t@tp d; d n h@tp; b t n h@tp", "all_gather_matmul tp t"),
        ("b t@tp d; c d k@tp h; c b t k@tp h", "all_gather_matmul tp t mixed"),
        ("b t@tp d; n@tp d h; b t n@tp h", "all_gather_matmul tp t mixed"),
        ("b t@tp d; f@tp d; b t f@tp", "all_gather_matmul tp t NK"),
        ("b t d@tp; d f@tp; b t f@tp", "all_gather_matmul tp d"),
        ("m@tp,ep k; k n@ep l@tp; m n@ep l@tp", "all_gather_matmul tp,ep m"),
        # The weights come first.
        ("d n@tp h; b t@tp d; b t n@tp h", "all_gather_matmul tp t swapped"),
        ("n@tp h d; b t n@tp h; b t d", "matmul_all_reduce tp swapped"),
        ("k@tp n; m k@tp; m n", "matmul_all_reduce tp swapped"),
        ("d@data n@tp h; b@data t@tp d; b@data t n@tp h", "all_gather_matmul tp t swapped gathers d along data"),
        # Axes of data shard the weights as well: in the program where they are the last ones, before it otherwise.
        ("b@data t k@tp; k@tp n@data; b@data t n", "matmul_all_reduce tp gathers n along data"),
        ("b@data t k@tp; k@tp,data n; b@data t n", "matmul_all_reduce tp gathers k along data"),
        ("b@data t k@tp; k@data,tp n; b@data t n", "matmul_all_reduce tp after data"),
        ("b@data t@tp d; d@data f@tp; b@data t f@tp", "all_gather_matmul tp t gathers d along data"),
        ("m k@tp; k@tp n@data; m n", "matmul_all_reduce tp after data"),
        ("b@data t k@tp; k@ep,tp,data n; b@data t n", "matmul_all_reduce tp gathers k along data after ep"),
        # No communication but that.
        ("b@data d; d f@tp; b@data f@tp", "local"),
        ("b@data d; d@data f; b@data f", "local gathers d along data"),
    ),
)
def test_plans(product: str, wanted: str) -> None:
    assert described(planned(product)) == wanted


@pytest.mark.parametrize(
    ("product", "reason"),
    (
        ("b m k@tp; b k@tp n; b m n", "'b': it is a batch of products"),
        ("m; n; m n", "no dimension is contracted"),
        ("m m k@tp; k@tp n; m n", "diagonal"),
        ("m k@tp s; k@tp n; m n", "dimension 's' of one operand is summed up alone"),
        ("m k@tp; k@tp e; m e", "an operand is empty"),
        ("o@tp k; k n@tp; o n@tp", "('tp',) do not divide the 3 places of dimension 'o'"),
        ("m k@tp; k n@tp; m n", "the axis 'tp' along 'k' of lhs and 'n' of rhs alone"),
        ("m@tp k; k n; m n", "the axis 'tp' along 'm' of lhs alone"),
        ("m@tp k; k n@tp; m n", "the axis 'tp' along 'm' of lhs and 'n' of rhs alone"),
        ("m k; k n; m@tp n", "the axis 'tp' along 'm' of the result alone"),
        ("m k@tp; k@ep n; m n", "the axis 'tp' along 'k' of lhs alone"),
        ("m k@tp,ep; k@tp,ep n; m@tp n", "along [('tp',), ('ep',)]"),
        ("m@ep k@tp; k@tp n@ep; m n@ep", "along [('ep',), ('tp',)]"),
        ("m k@tp,ep; k@ep,tp n; m n", "dimension 'k' would have to be sharded along ('ep', 'tp')"),
        ("b@tp,data t d; d f@tp; b@data t f@tp", "dimension 'b' would have to be sharded along ('data', 'tp')"),
        ("b@data t k@tp; k@tp n; b@tp,data t n", "dimension 'b' would have to be sharded along ('data', 'tp')"),
        ("m k@tp; k@tp n l; m n l@tp", "dimension 'l' is not the first of the columns"),
        ("m k; k n@tp,ep; m n@ep,tp", "dimension 'n' would have to be sharded along ('tp', 'ep')"),
        ("m k@tp; k@tp; m", "one operand is a vector"),
    ),
)
def test_reasons(product: str, reason: str) -> None:
    found = planned(product)
    assert isinstance(found, list) and any(reason in each for each in found), found


@pytest.mark.parametrize(
    ("product", "epilogue", "reason"),
    (
        ("m k@tp; k@tp n; m n", ("gate",), "matmul_all_reduce has no gate"),
        ("m k@tp; k@tp n; m n@tp", ("bias",), "a scatter along columns has no bias"),
        ("k n@tp; m@tp k; m n@tp", ("bias",), "with a bias rhs has to be the weights"),
    ),
)
def test_reasons_of_an_epilogue(product: str, epilogue: tuple[str, ...], reason: str) -> None:
    found = planned(product, epilogue)
    assert isinstance(found, list) and any(reason in each for each in found), found


def test_all_reasons_are_given() -> None:
    found = planned("m@tp k; k n; m@data n")
    assert isinstance(found, list) and "'tp'" in found[0] and "'data'" in found[1]
