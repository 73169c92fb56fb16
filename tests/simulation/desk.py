"""What an engine does for its sessions, as `leyline.loop` does it, and the books beside them."""

from __future__ import annotations

from typing import Any

from leyline.context import Context
from leyline.directive import Directive
from leyline.errors import CapacityError
from leyline.job import Job
from leyline.sequence import EditRequest, View
from leyline.sequence import Sequence as Work
from leyline.session import Session
from leyline.turn import Turn, tool_outputs
from tests.simulation import promises
from tests.simulation.cast import Said, Talk, Twin, reach
from tests.simulation.edit_laws import degrade_at_admission
from tests.simulation.laws import labelled
from tests.simulation.purging import Scene, found, purge
from tests.simulation.symbols import END_THINK, THINK, Letters, require, spelled
from tests.simulation.world import World

LETTERS: Any = Letters()


class Desk(World):
    """A world whose sequences serve sessions."""

    # Sequences.

    def add(self, twin: Twin) -> None:
        """Hand a sequence to the scheduler."""
        self.log("add", twin.work.sequence_id, len(twin.symbols), [*twin.work.edits])
        twin.known = twin.work.view.context
        self.live[twin.work.sequence_id] = twin
        if twin.talk is not None:
            self.stop_healing(twin.talk)
            twin.talk.session.sequence_id = twin.work.sequence_id
        self.scheduler.add(twin.work)

    def serving(self, twin: Twin, talk: Talk, turn: Turn, *, keep: bool = False) -> Twin:
        """A twin whose sequence is a turn of a session."""
        said: object = Said()
        twin.talk = talk
        twin.promised = min(talk.promised, twin.work.computed)
        twin.job = Job(twin.work, talk.session, said, turn, keep=keep, reply_start=len(turn.after))  # type: ignore[arg-type]
        spans = tool_outputs(turn.messages)
        twin.told = [frozenset(twin.tags[span.start : span.end]) for span in spans]
        return twin

    def editing(self, talk: Talk) -> Twin:
        """A twin whose sequence edits an idle session."""
        session, length = talk.session, len(talk.context)
        work = Work(self.new_id(), View(talk.context), computed=session.computed)
        work.owed = length - session.computed
        twin = Twin(work, labelled(self, talk.context), list(talk.tags), talk=talk)
        twin.job = Job(work, session)
        twin.promised = talk.promised
        return twin

    def affords(self, talk: Talk | None, directives: tuple[Directive, ...], length: int) -> bool:
        """Whether the context before an edit is to be kept."""
        if talk is None:
            return self.random.random() < 0.3
        after = length + sum(directive.delta for directive in directives)
        return self.sessions.affords_version(talk.session, directives[0].start, after)

    def answer(self, twin: Twin, request_id: int, how: str) -> None:
        """An edit request gets its one answer."""
        require("terminal", request_id in twin.requests, f"request {request_id}: {how}, unasked")
        del twin.requests[request_id]
        require("terminal", request_id not in self.answers, f"request {request_id} answered twice")
        self.answers[request_id] = how

    def end(self, twin: Twin, how: str) -> None:
        """A sequence gets its one end; its session goes on from what it has."""
        number = twin.work.sequence_id
        require("terminal", number not in self.ended, f"sequence {number} ended twice")
        for request_id in sorted(twin.requests):
            self.answer(twin, request_id, how)
        self.ended[number] = how
        turn = twin.job.turn if twin.job else None
        self.tally["turns once more"] += turn is not None and turn.again_from is not None
        self.tally["turns told anew"] += bool(turn and turn.directives and not turn.carried)
        del self.live[number]
        if twin.heals is not None:
            self.end_healing(twin, twin.heals, how)
        elif twin.talk is not None and twin.job is not None:
            self.close(twin, twin.talk, twin.job, how)

    def close(self, twin: Twin, talk: Talk, job: Job, how: str) -> None:
        """A session is idle again."""
        session, done = talk.session, how in ("stop", "length", "edited")
        session.sequence_id = None
        if done or job.edited:
            self.hand_over(twin, talk, job, answered=done)
        elif not len(session.context):
            self.sessions.delete(session)
        session.last_used = self.now
        self.fit(talk)
        self.tend(talk, turn_ended=done and job.reply is not None)

    # What a session learns.

    def enters(self, tags: list[int], talk: Talk, job: Job) -> None:
        """The prompt of a turn enters its session: a version more if its client edited history.

        Who asks for the last turn again has nothing to do with the reply that was there, nor with
        the marks on it.
        """
        turn = job.turn
        if turn is not None and turn.again_from is not None and not job._entered:
            for name, promise in list(talk.promises.items()):
                if promise.end(talk.tags) > turn.again_from:
                    del talk.promises[name]
        if job.owes_version:
            talk.remember(talk.session.version, talk.tags)
            for promise in talk.promises.values():
                promise.absorb(tags)

    def hand_over(self, twin: Twin, talk: Talk, job: Job, *, answered: bool) -> None:
        """The session goes on from the sequence's context, or a little less (a stop string)."""
        session, before = talk.session, talk.tags
        self.enters(twin.tags, talk, job)
        job.hand_over(LETTERS, answered=answered)  # type: ignore[arg-type]
        length, whole = len(talk.context), twin.work.view.whole()
        said = job.reply.num_kept() if isinstance(job.reply, Said) and job.reply.stopped else None
        num = len(twin.work.generated) if said is None else said
        num = num if answered else 0
        dropped = len(twin.work.generated) - num
        fits = length in (len(whole), len(whole) - dropped)
        require("terminal", fits, f"a session goes on from {length} tokens of {len(whole)}")
        same = labelled(self, talk.context) == twin.symbols[:length]
        require("terminal", same, "a session goes on from another context")
        talk.tags, talk.promised = twin.tags[:length], session.computed
        if session.checkpoint is not None and job.turn is not None:
            talk.base = talk.base if job.turn.again_from is not None else before
        if job.turn is not None:
            thought = self.thought(talk, twin) if num else []
            promises.settle(talk, "reasoning", thought, answered=answered)
            told = [span for span in twin.told if reach(span, talk.tags)]
            promises.settle(talk, "tool_output", told, answered=answered)
        promises.marks(self, talk)

    def thought(self, talk: Talk, twin: Twin) -> list[frozenset[int]]:
        """The tags of the reasoning in a reply as it stands."""
        first = next((at for at, tag in enumerate(talk.tags) if tag in twin.reply), len(talk.tags))
        tags = talk.tags[first:]
        tokens = [self.texts[tag] for tag in tags]
        ends = [at for at, token in enumerate(tokens) if token == END_THINK]
        starts = [at for at, token in enumerate(tokens) if token == THINK]
        if ends:
            opened = bool(starts) and starts[0] < ends[0]
            span = tags[starts[0] : ends[0] + 1] if opened else tags[: ends[0]]
        elif starts:
            span = tags[starts[0] : len(tags) - (tokens[-1] in Letters.stop_ids)]
        else:
            span = []
        return [frozenset(span)] if span else []

    # Between turns.

    def meet(self, session: Session) -> Talk | None:
        """A new session, if there is room for it."""
        try:
            session.last_used = self.now
            self.sessions.admit(session, self.now)
        except CapacityError:
            self.tally["sessions refused"] += 1
            return None
        self.talks.append(Talk(session))
        self.census()
        return self.talks[-1]

    def fit(self, talk: Talk) -> None:
        """Bring sessions back into their limits."""
        before = [(version.number, version.kept) for version in talk.session.versions]
        self.sessions.fit(talk.session)
        promises.versions(self, talk, before, self.sessions.session_slots)
        self.census()

    def tend(self, talk: Talk, *, turn_ended: bool) -> None:
        """See to what an idle session has coming: marks that are due, then its healing."""
        if talk not in self.talks:
            return
        due = promises.turn_ends(self, talk) if turn_ended else ()
        if due:
            self.fire(talk, due)
        if not talk.busy and talk.session.healing:
            self.heal(talk)

    def fire(self, talk: Talk, due: tuple[Directive, ...]) -> None:
        """Carry out marks whose time has come; one that does not fit any more is given up."""
        length = len(talk.context)
        if not 0 < length + sum(directive.delta for directive in due) <= self.max_len:
            self.tally["marks that did not fit"] += 1
            return
        twin = self.editing(talk)
        request = EditRequest(self.new_id(), due, keep=self.affords(talk, due, length))
        twin.requests[request.request_id] = request
        twin.work.edits.append(request)
        assert twin.job is not None
        twin.job.requests[request.request_id] = request
        spans = (talk.tags[directive.start : directive.end] for directive in due)
        twin.doomed = frozenset(tag for span in spans for tag in span)
        self.add(twin)

    def heal(self, talk: Talk) -> None:
        """Have the exact form of a session's context computed in the background."""
        exact = Context.of(talk.context.tokens, talk.context.root)
        work = Work(self.new_id(), View(exact), background=True)
        work.owed = len(exact) - talk.session.computed
        talk.session.heal_id = work.sequence_id
        self.add(Twin(work, labelled(self, exact), list(talk.tags), heals=talk))

    def end_healing(self, twin: Twin, talk: Talk, how: str) -> None:
        """A session is healed, or nobody heals it any more."""
        talk.session.heal_id = None
        if how == "edited":
            promises.healed(self, twin, talk)

    def stop_healing(self, talk: Talk) -> None:
        """Give a healing up."""
        number = talk.session.heal_id
        if number is not None:
            self.scheduler.finish(number)
            self.end(self.live[number], "cancelled")

    def stop_orphans(self) -> None:
        """Give up the healing of sessions that are gone."""
        for twin in list(self.live.values()):
            if twin.heals is not None and twin.heals not in self.talks:
                self.stop_healing(twin.heals)

    # Purges.

    def forget(self, root: bytes, text: bytes) -> None:
        """Purge a text of one tenant, as an edit with that reach would."""
        if self.roomy or not text:
            return
        self.log("purge", root, text)
        scene = Scene(self, root, text)
        found(scene)
        told = self.reach.purge(root, text)
        self.surprise()
        self.lossy = True
        self.tally["purges"] += 1
        self.tally["sequences displaced"] += told.sequences
        self.tally["versions purged"] += told.versions
        self.tally["sessions that lost grafts"] += len(told.degraded)
        purge(scene)
        self.follow_purge(root, text)

    def follow_purge(self, root: bytes, text: bytes) -> None:
        """What a purge has left of contexts, and of the marks that would put the text in."""
        for twin in self.live.values():
            if twin.work.view.context is not twin.known:
                degrade_at_admission(self, twin)
        for talk in self.talks:
            if talk.context.root == root:
                for name, promise in list(talk.promises.items()):
                    if text in spelled(promise.mark.replacement):
                        del talk.promises[name]
                promises.marks(self, talk)
