"""The one door for statements: what a statement names decides how it is answered.

* FROM a table whose records have budgets of their own: a question of points (`pipelines.session`);
* ``CREATE ALLOTMENT name AS SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = e) * FROM ..``
  charges budget of such a table for later questions of the same analyst, and ``DROP ALLOTMENT name
  ON table`` ends that;
* FROM ``dpstream.NAME``: a system table, free (`sql.system`);
* anything else: a statement about the tables of a data set with a unit (`sql.ask`).

The same statement after EXPLAIN costs nothing, whatever it is.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from sqlglot.tokens import Token, TokenType

from dpstream.accounting.errors import UsageError
from dpstream.accounting.strength import weaknesses
from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.project.project import Project, is_session_table
from dpstream.pipelines.render.question_plan import explanation_text, session_text
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.sql import ask as units
from dpstream.pipelines.sql.explain import as_builtins, explain, explained
from dpstream.pipelines.sql.load import catalog_of, public_tables
from dpstream.pipelines.sql.query_plan import Question, question_of
from dpstream.pipelines.sql.receipt import SqlAnswer, free
from dpstream.pipelines.statements.allowed import tokens_of
from dpstream.pipelines.statements.errors import refusal
from dpstream.pipelines.tables.catalog import Catalog, Tables
from dpstream.state.connecting import Closing
from dpstream.state.ledger.open import AccountPlace


class Route(NamedTuple):
    """How a statement is answered.

    Attributes:
        way: ``units``, ``points``, ``allot``, ``drop`` or ``system``.
        text: the statement, or the SELECT of CREATE ALLOTMENT, at its place.
        table: of points; empty for the others.
        name: of an allotment.
        explains: whether it is to be planned only.
    """

    way: str
    text: str
    table: str = ""
    name: str = ""
    explains: bool = False


class Explanation(NamedTuple):
    """The plan of some statements of one way.

    Attributes:
        figures: as values for JSON; text: the same as text.
        exit_code: of asking them now.
    """

    figures: dict[str, Any]
    text: str
    exit_code: int


#: Shows an answer or a plan.
Show = Callable[["SqlAnswer | Explanation"], object]


class Door(Closing):
    """What the statements of a project file can name; a context that closes it.

    Args:
        data_set: the only data set whose tables are named; ``None``: the statement's tables decide.
        analyst: whose quota is charged, and whose allotments are drawn on.
        runner: the runner whose workers read and draw, with the same bytes; ``None``: this process.
        held: copy the coordinates of points into memory, for many questions.
    """

    def __init__(
        self,
        project: Project,
        data_set: str | None = None,
        analyst: str = "analyst",
        runner: Runner | None = None,
        held: bool = False,
    ) -> None:
        self._project, self._data_set, self._analyst = project, data_set, analyst
        self._runner, self._held = runner, held
        sections = project.sections.table
        self._tables = {
            name.lower(): name
            for name, table in sections.items()
            if is_session_table(table)
            and (data_set is None or project.data_set(table.data_set, "data_set")[0] == data_set)
        }
        self._views = {name.lower(): text for name, text in project.sections.view.items()}
        self._open: dict[tuple[str, bool], tuple[Any, Tables]] = {}
        if not self._tables:
            _ = self.catalog  # its errors are told at once

    @functools.cached_property
    def catalog(self) -> Catalog:
        """The catalog of the data set with a unit."""
        return catalog_of(self._project, self._data_set)

    def route(self, text: str, explains: bool = False) -> Route:
        """Return how a statement is answered, perhaps one after EXPLAIN.

        Raises:
            DpstreamError: it is no text of SQL, or ends an allotment in another form.
        """
        inner = explained(text)
        if inner is None:
            return self._route(text)._replace(explains=explains)
        return self._route(inner)._replace(explains=True)

    def _route(self, text: str) -> Route:
        from dpstream.pipelines.door.system import system_tables

        if not self._tables:
            return Route("system" if system_tables(text) else "units", text)
        tokens = tokens_of(text)
        words = [token.text for token in tokens[:6]]
        upper = [word.upper() for word in words]
        if upper[:2] == ["CREATE", "ALLOTMENT"]:
            if upper[3:4] != ["AS"] or len(tokens) < 5:
                fix = "write CREATE ALLOTMENT name AS SELECT WITH DIFFERENTIAL_PRIVACY .. * FROM .."
                raise UsageError("statement", "is no allotment", fix)
            begin = tokens[4].start
            text = "".join(c if c == "\n" else " " for c in text[:begin]) + text[begin:]
            return Route("allot", text, self._named(tokens), words[2])
        if upper[:2] == ["DROP", "ALLOTMENT"]:
            table = words[4].lower() if len(tokens) == 5 and upper[3] == "ON" else ""
            if table not in self._tables:
                rule = "names no table with allotments"
                raise UsageError("statement", rule, "write DROP ALLOTMENT name ON table")
            return Route("drop", text, table, words[2])
        if system_tables(text):
            return Route("system", text)
        table = self._named(tokens)
        return Route("points" if table else "units", text, table)

    def _named(self, tokens: Sequence[Token]) -> str:
        """Return the table of points that a statement, or a view in it, reads."""
        for before, token in itertools.pairwise(tokens):
            name = str(token.text).lower()
            if before.token_type not in (TokenType.FROM, TokenType.JOIN):
                continue
            view = self._views.get(name)
            table = name if name in self._tables else ""
            table = table or ("" if view is None else self._named(tokens_of(view)))
            if table:
                return table
        return ""

    def check(self, route: Route) -> None:
        """Refuse a statement that cannot be asked, before another one is charged."""
        if route.way == "units":
            units.check(question_of(route.text, self.catalog), self.catalog)
        elif route.way in ("points", "allot"):
            from dpstream.pipelines.session.statement import checked_statement

            checked_statement(route.text, self.opened(route.table)[1], route.way == "allot")

    def account(self, route: Route) -> AccountPlace | None:
        """Return the account that a statement is charged in; ``None`` if it is free."""
        if route.way == "system":
            return None
        return self.opened(route.table)[0].config.account if route.table else self.catalog.ledger

    def answer(self, text: str, how: Asking) -> SqlAnswer:
        """Return the answer of a statement, or the plan of one after EXPLAIN.

        Raises:
            DpstreamError: it cannot be used, or not privately as it is written, or is refused.
        """
        answers = list[SqlAnswer | Explanation]()
        self.answer_each([text], how, answers.append)
        [answer] = answers
        if isinstance(answer, Explanation):
            return free(pa.table({"plan": answer.text.splitlines()}))
        return answer

    def answer_each(
        self, texts: Sequence[str], how: Asking, show: Show, explains: bool = False
    ) -> None:
        """Answer statements in order, and show each answer before the next is asked.

        Args:
            show: gets the plan of each statement after EXPLAIN; if all are, those about units have
                one together.
            explains: as if EXPLAIN were before each.

        Raises:
            DpstreamError: see `answer`.
        """
        routes = [self.route(text, explains) for text in texts]
        alone = all(route.explains for route in routes)
        for way, group in itertools.groupby(routes, lambda route: route.way):
            if way == "units":
                self._answer_units(list(group), how, show, alone)
                continue
            for route in group:
                self._answer(route, how, show)

    def _answer_units(self, routes: Sequence[Route], how: Asking, show: Show, alone: bool) -> None:
        if alone:
            show(self._explained([route.text for route in routes], how))
            return

        def private() -> Iterator[Question]:
            """Yield the questions in order; show the plans between them."""
            for route in routes:
                if route.explains:
                    show(self._explained([route.text], how))
                else:
                    yield question_of(route.text, self.catalog)

        if all(route.explains for route in routes):
            for _ in private():
                pass
        else:
            units.ask_each(self.catalog, private(), show, how, runner=self._runner)

    def _explained(self, texts: Sequence[str], how: Asking) -> Explanation:
        plan = explain(self.catalog, texts, how)
        figures = as_builtins(plan)
        return Explanation(figures, explanation_text(figures), plan.acceptance.exit_code)

    def _answer(self, route: Route, how: Asking, show: Show) -> None:
        from dpstream.pipelines.door.system import answered
        from dpstream.pipelines.session import answer
        from dpstream.pipelines.session import plan as planning
        from dpstream.pipelines.session.statement import checked_statement, question_of

        if route.way in ("system", "drop") and route.explains:
            raise UsageError("statement", "costs nothing", "write it without EXPLAIN")
        if route.way == "system":
            show(free(answered(route.text, self._all())))
            return
        open_table, tables = self.opened(route.table, route.explains)
        if route.way == "drop":
            show(answer.give_up(open_table, route.name))
            return
        statement = checked_statement(route.text, tables, route.way == "allot")
        question = question_of(statement, open_table, tables, how)
        if route.explains and question.union:
            raise UsageError("statement", "costs nothing", "write it without EXPLAIN")
        if route.explains:
            plan = planning.plan(open_table, question.request, union=True)
            figures = planning.as_builtins(open_table.space, plan)
            show(Explanation(figures, session_text(figures), plan.acceptance.exit_code))
        elif route.way == "allot":
            show(answer.allot(open_table, question, route.name))
        else:
            answer.ask(open_table, tables, question, show)

    def remarks(self, answer: SqlAnswer) -> tuple[list[str], list[str]]:
        """Return warnings about what an answer's charge promises, and by what values of columns of
        points are rounded.
        """
        header = answer.header
        points = header.points
        if not points:
            return weaknesses(header.epsilon, header.delta) if header.run_id else [], []
        from dpstream.pipelines.session.sentences import rounding_of

        opened = (open_table.table for open_table, _ in self._open.values())
        table = next(table for table in opened if table.digest == points.table)
        return table.warnings, rounding_of(table.space, points.question)

    def _all(self) -> list[Any]:
        return [self.opened(name, looking=True)[0] for name in self._tables]

    def opened(self, name: str, looking: bool = False) -> tuple[Any, Tables]:
        """Return an open table of points, and what statements about it can name."""
        from dpstream.pipelines.session.config import config_in
        from dpstream.pipelines.session.open_table import OpenTable
        from dpstream.pipelines.session.statement import tables_of

        if name not in self._tables:
            raise refusal("no-private-table")
        if (name, False) in self._open:
            return self._open[name, False]
        if (name, looking) not in self._open:
            config = config_in(self._project, self._tables[name])
            public = public_tables(self._project)
            tables = tables_of(name, config.table.dimensions, public, self._views)
            opened = OpenTable(config, self._analyst, self._held, self._runner, looking)
            self._open[name, looking] = opened, tables
        return self._open[name, looking]

    def close(self) -> None:
        """Close the accounts, and erase the secrets from memory."""
        while self._open:
            self._open.popitem()[1][0].close()
