"""What callers do: prompts, turns, edits, marks, and everything that goes wrong with them."""

from __future__ import annotations

from collections.abc import Iterable

from leyline.batch import Edited
from leyline.context import Context
from leyline.directive import Directive, Mode, Source, apply
from leyline.errors import QuotaError
from leyline.marks import Mark, MessageSpan, Of, follow_messages
from leyline.sampling import SamplingParams
from leyline.sequence import EditRequest, View
from leyline.sequence import Sequence as Work
from leyline.session import Session
from leyline.turn import Turn
from tests.simulation import promises
from tests.simulation.cast import Promise, Talk, Twin, coming
from tests.simulation.desk import Desk
from tests.simulation.edit_laws import atomic
from tests.simulation.laws import labelled, scores
from tests.simulation.symbols import (
    STOP,
    VOCABULARY,
    replaced,
    require,
    spelled,
)
from tests.simulation.world import TENANTS


class Callers(Desk):
    """A world and those who ask something of it."""

    def act(self) -> None:
        """One random thing that a caller does; time passes, and no dry run counts any more."""
        deeds = [
            (self.prompt, 3),
            (self.turn, 5),
            (self.rewrite, 2),
            (self.retell, 1),
            (self.again, 1),
            (self.revert, 1.5),
            (self.mark, 5),
            (self.unmark, 0.5),
            (self.purge, 0.5),
            (self.edit_idle, 6),
            (self.edit_busy, 4),
            (self.fork, 2),
            (self.cancel, 1),
            (self.cancel_edit, 1),
            (self.forget_talk, 0.3),
            (self.clear, 0.1),
        ]
        self.now += 1
        self.surprise()
        self.random.choices([deed for deed, _ in deeds], [weight for _, weight in deeds])[0]()

    def tokens(self, low: int, high: int) -> tuple[int, ...]:
        """Random tokens, at least `low` and at most `high` of them."""
        return tuple(
            self.random.randrange(VOCABULARY)
            for _ in range(self.random.randint(low, max(low, high)))
        )

    def idle_talk(self) -> Talk | None:
        """A session that is not busy."""
        self.sessions.expire(self.now)
        self.census()
        idle = [talk for talk in self.talks if not talk.busy and len(talk.context)]
        return self.random.choice(idle) if idle else None

    # Turns.

    def prompt(self) -> None:
        """A request without a session, or the first of one; often with tokens seen before."""
        root = self.random.choice(TENANTS)
        tokens = self.tokens(1, self.max_len // 2)
        if self.talks and self.random.random() < 0.6:
            known = self.random.choice(self.talks).context.tokens
            tokens = known[: self.random.randint(1, max(1, len(known)))] or tokens
        context, talk = Context.of(tokens, root), None
        if self.random.random() < 0.6 and len(context) < self.max_len:
            talk = self.meet(Session(self.new_name("session"), Context((), root)))
        tags = self.new_tags(tokens)
        self.start(context, tags, talk, Turn("", context, context, self.messages(talk, 0, context)))

    def messages(self, talk: Talk | None, start: int, context: Context) -> list[MessageSpan]:
        """A session's messages, and one or two more behind position `start`."""
        known = list(talk.session.messages) if talk else []
        middle = self.random.randint(start, len(context))
        role = self.random.choice(["user", "user", "tool"])
        new = [(role, start, middle), ("tool", middle, len(context))]
        return known + [MessageSpan(role, None, *span) for role, *span in new]

    def turn(self) -> None:
        """The next turn of a session."""
        talk = self.idle_talk()
        if talk is not None:
            tokens = self.tokens(self.random.choice([0, 1, 1, 1]), 4)
            context = talk.context.append(tokens)
            messages = self.messages(talk, len(talk.context), context)
            turn = Turn("", context, context, messages)
            self.start(context, talk.tags + self.new_tags(tokens), talk, turn)

    def again(self) -> None:
        """A client asks for the last turn once more, perhaps with other tokens."""
        talk = self.idle_talk()
        if talk is None or talk.session.checkpoint is None:
            return
        base, _, messages = talk.session.checkpoint
        same = self.random.random() < 0.5
        tokens = talk.context.tokens[len(base) :][:3] if same else self.tokens(1, 3)
        context = base.append(tokens)
        spans = [*messages, MessageSpan("user", None, len(base), len(context))]
        turn = Turn("", context, context, spans, again_from=len(base))
        self.start(context, talk.base + self.new_tags(tokens), talk, turn)

    def retell(self) -> None:
        """A client has edited its history, and what it changed is computed anew."""
        talk = self.idle_talk()
        if talk is None or not len(talk.context):
            return
        known, tokens = talk.context, self.tokens(0, 2)
        directives = self.directives(talk.context.root, known, modes=[Mode.FORGET])
        after = apply(known, directives).after.exact_from(directives[0].start).append(tokens)
        if 0 < len(after) < self.max_len:
            new = self.new_tags(t for directive in directives for t in directive.replacement)
            tags = replaced(talk.tags, directives, new) + self.new_tags(tokens)
            spans = follow_messages(talk.session.messages, directives)
            turn = Turn("", after, after, spans, directives)
            keep = self.affords(talk, directives, len(known))
            self.start(after, tags, talk, turn, keep=keep)

    def start(
        self,
        context: Context,
        tags: list[int],
        talk: Talk | None,
        turn: Turn,
        *,
        keep: bool = False,
    ) -> None:
        """Queue a sequence that samples, if there is room for it."""
        room = self.max_len - len(context)
        if room > 0 and len(context):
            work = Work(
                self.new_id(),
                View(context),
                SamplingParams(),
                self.random.randint(1, min(room, 8)),
                frozenset({STOP}) if self.random.random() < 0.3 else frozenset(),
                computed=talk.session.known(context) if talk else 0,
            )
            twin = Twin(work, labelled(self, context), tags)
            if talk is None and work.sequence_id % 2 == 0:
                self.have_scored(work)
            self.add(self.serving(twin, talk, turn, keep=keep) if talk else twin)

    def have_scored(self, work: Work) -> None:
        """Some clients want to know how likely their prompt was, or nothing else at all."""
        work.sampling = SamplingParams(prompt_logprobs=0)
        work.max_tokens *= work.sequence_id % 6 != 0
        self.tally["scored"] += 1

    def rewrite(self) -> None:
        """The next turn of a session whose client has edited its history."""
        talk = self.idle_talk()
        if talk is None or not len(talk.context):
            return
        work = Work(
            self.new_id(), View(talk.context), SamplingParams(), computed=talk.session.computed
        )
        twin = Twin(work, labelled(self, talk.context), list(talk.tags), talk=talk)
        asked = [*self.requests(twin, 1, own=True)]
        work.edits.extend(asked)
        room = self.max_len - coming(work)
        if asked and room > 0:
            work.max_tokens = self.random.randint(1, min(room, 8))
            self.add(self.carrying(twin, talk, asked[0]))
        else:
            self.ended[work.sequence_id] = "refused"
            self.answers |= dict.fromkeys(twin.requests, "refused")

    def carrying(self, twin: Twin, talk: Talk, own: EditRequest) -> Twin:
        """A twin whose sequence is a turn that begins with an edit of its own."""
        after = apply(talk.context, own.directives).after.append(own.append)
        spans = follow_messages(talk.session.messages, own.directives)
        start = len(after) - len(own.append)
        spans.append(MessageSpan("tool", None, start, len(after)))
        turn = Turn("", talk.context, after, spans, own.directives, True, own.append)
        self.serving(twin, talk, turn, keep=own.keep)
        assert twin.job is not None
        twin.job.requests[own.request_id] = own
        twin.told = []
        return twin

    # Edits.

    def edit_idle(self) -> None:
        """One or two sets of directives for an idle session, perhaps tried out before."""
        talk = self.idle_talk()
        if talk is None or not len(talk.context):
            return
        twin = self.editing(talk)
        twin.work.owed *= self.random.choice([0, 1, 1])
        for request in self.requests(twin, self.random.choice([1, 1, 2])):
            twin.work.edits.append(request)
        if not twin.work.edits:
            self.ended[twin.work.sequence_id] = "refused"
            return
        if self.foreseeable and not self.scheduler.foreground and self.random.random() < 0.7:
            twin.forecast = self.rehearse(twin, talk)
        self.add(twin)

    def rehearse(self, twin: Twin, talk: Talk) -> list[Edited]:
        """What the edits would come to if they were asked for now."""
        job, work = twin.job, twin.work
        assert job is not None, "an edit of nobody"
        double, session = job.double(work.edits[0])
        double.requests = dict(twin.requests)
        self.tally["dry runs"] += 1
        with self.sessions.standing_in(session):
            return self.scheduler.rehearse(work, talk.session.heal_id, double.commit)

    def edit_busy(self) -> None:
        """A set of directives for a sequence that waits or runs."""
        busy = [twin for twin in self.live.values() if twin.heals is None and not scores(twin.work)]
        if busy:
            twin = self.random.choice(busy)
            for request in self.requests(twin, 1):
                self.log("edit", twin.work.sequence_id, request)
                self.scheduler.edit(twin.work.sequence_id, request)

    def requests(self, twin: Twin, num: int, *, own: bool = False) -> Iterable[EditRequest]:
        """Sets of directives that fit the context as the edits before them leave it."""
        for _ in range(num):
            work = twin.work
            length = coming(work)
            room = self.max_len - length - max(0, work.max_tokens - len(work.generated))
            directives = self.directives(twin.root, work.view.whole(), length)
            append = self.tokens(0, 2) if own or self.random.random() < 0.1 else ()
            grown = sum(directive.delta for directive in directives)
            if -length < grown <= room - len(append):
                keep = self.random.random() < 0.6 and self.affords(twin.talk, directives, length)
                request = EditRequest(self.new_id(), directives, append, own, keep)
                twin.requests[request.request_id] = request
                if twin.job is not None:
                    twin.job.requests[request.request_id] = request
                yield request

    def directives(
        self,
        root: bytes,
        context: Context,
        length: int | None = None,
        modes: list[Mode] | None = None,
    ) -> tuple[Directive, ...]:
        """A random set: spans that may touch or be empty, in mixed modes; or one seen before."""
        length = len(context) if length is None else length
        if self.asked and modes is None and self.random.random() < 0.3:
            again = self.random.choice(self.asked)
            roots = {d.source.context.root for d in again if d.source is not None}
            if again[-1].end <= length and roots <= {root}:
                return again
        points = sorted(
            self.random.randint(0, length) for _ in range(2 * self.random.choice([1, 1, 2, 3]))
        )
        spans = zip(points[::2], points[1::2], strict=True)
        modes = modes or [Mode.AMORTIZE, Mode.AMORTIZE, Mode.HEAL, Mode.FORGET]
        directives = tuple(
            self.directive(context, start, end, self.random.choice(modes)) for start, end in spans
        )
        self.asked.append(directives)
        return directives

    def directive(self, context: Context, start: int, end: int, mode: Mode) -> Directive:
        """Mostly computed, sometimes brought from a session of the same tenant."""
        known = [talk.context for talk in self.talks if talk.context.root == context.root]
        if mode is Mode.FORGET or not known or self.random.random() < 0.75:
            return Directive(start, end, self.replacement(context, start, end), mode)
        source = self.random.choice(known)
        first = self.random.randint(0, len(source))
        shared = source.tokens[first : first + self.random.randint(0, 4)]
        return Directive(start, end, shared, mode, Source(source, first))

    def replacement(self, context: Context, start: int, end: int) -> tuple[int, ...]:
        """Some tokens, none, as many as were there, or the very same."""
        kind = self.random.randrange(6)
        same = context.tokens[start:end]
        if kind == 0 and len(same) == end - start:
            return same
        return self.tokens(end - start, end - start) if kind == 1 else self.tokens(0, 3)

    def cancel_edit(self) -> None:
        """A caller takes back an edit that was asked for, and with it those behind it."""
        works = ((twin, twin.work) for twin in self.live.values())
        busy = [twin for twin, work in works if work.edits and not work.own_edit]
        if not busy:
            return
        twin = self.random.choice(busy)
        waiting = [edit.request_id for edit in twin.work.edits]
        at = self.random.randrange(len(waiting))
        number, request = twin.work.sequence_id, waiting[at]
        self.log("cancel edit", number, request)
        atomic(self, twin, lambda: self.scheduler.cancel_edit(number, request))
        left = [edit.request_id for edit in twin.work.edits]
        require("atomic", left == waiting[:at], "an edit stayed that counted on a cancelled one")
        for dropped in waiting[at:]:
            self.answer(twin, dropped, "cancelled")
        if not twin.work.edits:
            twin.doomed = frozenset()

    # Marks.

    def mark(self) -> None:
        """A span is pinned, or is to decay, or to be scratched."""
        talk = self.idle_talk()
        if talk is None or not len(talk.context):
            return
        start = self.random.randrange(len(talk.context))
        end = self.random.randint(start + 1, len(talk.context))
        mark = self.random_mark(self.new_name("mark"), start, end)
        spans = [frozenset(talk.tags[start:end])] if mark.of == "span" else None
        promise = Promise(mark, spans, mark.turns_left)
        raised = max(0, end - promises.pinned_end(self, talk))
        room = promises.pin_room(self, talk.context.root)
        self.log("mark", talk.session.session_id, mark)
        try:
            if mark.verb == "pin":
                self.sessions.pin(talk.session, mark, self.now)
            else:
                talk.session.mark(mark)
        except QuotaError:
            require("pin", raised > room, f"{raised} rows were not pinned with room for {room}")
            self.tally["pins refused"] += 1
            return
        require("pin", mark.verb != "pin" or raised <= room, "pinned beyond the quota")
        talk.promises[mark.mark_id] = promise
        promises.marks(self, talk)
        self.tally[f"marks: {mark.verb} {mark.of}"] += 1

    def random_mark(self, name: str, start: int, end: int) -> Mark:
        """A mark of any verb."""
        random = self.random
        verb = random.choice(["pin", "pin", "decay", "scratch", "scratch"])
        if verb == "pin":
            until = random.choice([None, self.now + random.randint(1, 20)])
            return Mark(name, "pin", start, end, until, random.choice([None, 1, 3]))
        mode = random.choice([Mode.AMORTIZE, Mode.AMORTIZE, Mode.FORGET, Mode.HEAL])
        tokens = self.tokens(0, 2)
        if verb == "decay":
            return Mark(name, "decay", start, end, None, random.randint(1, 3), tokens, mode)
        kinds: list[Of] = ["span", "reasoning", "tool_output", "tool_output"]
        of = random.choice(kinds)
        start, end = (start, end) if of == "span" else (0, 0)
        return Mark(name, "scratch", start, end, None, 1, tokens, mode, of)

    def unmark(self) -> None:
        """A mark is taken off."""
        talk = self.idle_talk()
        if talk is not None and talk.promises:
            name = self.random.choice([*talk.promises])
            if any(mark.mark_id == name for mark in talk.session.marks):
                while any(mark.mark_id == name for mark in talk.session.marks):
                    talk.session.unmark(name)
                del talk.promises[name]

    # Whole sessions.

    def revert(self) -> None:
        """A session goes back to a version, as far as its rows are still there."""
        talk = self.idle_talk()
        if talk is None or not talk.session.versions:
            return
        session = talk.session
        number = self.random.choice([version.number for version in session.versions])
        talk.remember(session.version, talk.tags)
        session.revert(number)
        self.log("revert", session.session_id, number)
        self.stop_healing(talk)
        self.fit(talk)
        there = min(self.prefix.resident(session.context), session.computed)
        session.context = session.context.exact_from(session.context.first_graft(there))
        self.follow_revert(talk, number)
        talk.promised = there
        self.tally["reverts"] += 1
        self.tend(talk, turn_ended=False)

    def follow_revert(self, talk: Talk, number: int) -> None:
        """What is there of a session's text and its marks once it has gone back."""
        talk.tags, spans = talk.past[number]
        for name, promise in list(talk.promises.items()):
            if name in spans:
                promise.spans = spans[name]
            else:
                del talk.promises[name]
        promises.marks(self, talk)

    def fork(self) -> None:
        """A second session with the history of another."""
        talk = self.idle_talk()
        if talk is None or not len(talk.context):
            return
        computed_rows, promised, tags = talk.session.computed, talk.promised, list(talk.tags)
        name = self.new_name("session")
        twin = self.meet(Session(name, talk.context, computed=computed_rows))
        if twin is not None:
            twin.tags, twin.promised = tags, promised

    def forget_talk(self) -> None:
        """A session is deleted."""
        talk = self.idle_talk()
        if talk is not None:
            self.sessions.delete(talk.session)
            self.census()

    def cancel(self) -> None:
        """A caller hangs up."""
        if self.live:
            twin = self.random.choice([*self.live.values()])
            self.log("cancel", twin.work.sequence_id)
            atomic(self, twin, lambda: self.scheduler.finish(twin.work.sequence_id))
            self.end(twin, "cancelled")

    # The cache.

    def purge(self) -> None:
        """A text that somebody was told is to be forgotten."""
        talk = self.idle_talk()
        if talk is not None:
            tokens = talk.context.tokens
            start = self.random.randrange(len(tokens))
            part = spelled(tokens[start : start + self.random.randint(1, 4)])
            self.forget(talk.context.root, part[self.random.choice([0, 0, 1]) :])

    def clear(self) -> None:
        """Every row that nobody runs on is forgotten."""
        if not self.roomy:
            self.log("clear")
            self.lossy = True
            self.prefix.clear()
