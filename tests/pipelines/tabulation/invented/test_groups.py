"""Invented iterations and codes."""

import numpy as np

from dpstream.pipelines.tabulation.characteristics import CODES, MAP, RACE_ITERATIONS
from dpstream.pipelines.tabulation.invented.groups import PRODUCTION, SMALL, invent, zipf


def test_weights_fall_slowly() -> None:
    weights = zipf(1_000)
    assert np.isclose(weights.sum(), 1.0) and (np.diff(weights) < 0).all()
    assert weights[0] > 0.1 and weights[100:].sum() > 0.2


def test_every_group_has_a_code_and_every_code_a_group() -> None:
    for shape in (SMALL, PRODUCTION):
        made = invent(shape, 3)
        assert len(made.race) == shape.race_codes and np.isclose(made.race_weights.sum(), 1.0)
        assert len(made.ethnicity) == shape.ethnic_codes + 1
        assert np.isclose(made.ethnicity_weights.sum(), 1.0)
        codes = {code for code, _ in made.files[CODES]}
        assert codes == {str(code) for code in [*made.race, *made.ethnicity]}
        mapped = {code for _, code in made.files[MAP]}
        assert mapped == codes
        assert {code for code, *_ in made.files[RACE_ITERATIONS]} <= {
            iteration for iteration, _ in made.files[MAP]
        }


def test_names_and_codes_are_there_once() -> None:
    made = invent(PRODUCTION, 0)
    for rows in (made.files[RACE_ITERATIONS], made.files[CODES]):
        assert len({row[0] for row in rows}) == len({row[1] for row in rows}) == len(rows)


def test_alone_and_in_combination_have_the_same_codes() -> None:
    made = invent(PRODUCTION, 1)
    codes = dict[str, set[str]]()
    for iteration, code in made.files[MAP]:
        codes.setdefault(iteration, set()).add(code)
    of_name = dict[str, list[set[str]]]()
    for code, name, level, *_ in made.files[RACE_ITERATIONS]:
        if level != "0":
            of_name.setdefault(name.partition(" alone")[0], []).append(codes[code])
    assert all(len(pair) == 2 and pair[0] == pair[1] for pair in of_name.values())
