"""A radix trie of token runs, each position with a slot of its own, under a bound of slots.

It knows which prefixes are kept and where, and no model: a slot is a number below `slots`, under
which an engine keeps what it computed for that position. What is computed depends on the tokens
above and on the adapter, so each adapter has a root of its own.

What holds between any two calls, and `check` verifies:

1. Every slot is either free or belongs to exactly one position of one run.
2. No run but a root is empty; runs below one run begin with different tokens.
3. What is computed of a run is its first part, and nothing below a run that is not computed
   throughout is computed at all.
4. Runs below two roots have nothing in common.
5. A run was used at least as lately as those below it. Every run that has none below it waits in
   the queue of what to evict next.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator, Sequence

import numpy as np

from lmpool.backends.trie_runs import TOKEN_BYTES, Lease, Run, Slots, Tokens, TrieStatistics

_NO_SLOTS: Slots = np.empty(0, np.int64)


class TokenTrie:
    """Which token positions are kept, and in which slots.

    `lease` finds or adds a prompt; `commit` says that what was added is computed, `discard` takes
    it out again. `hold` leases what is there of a prompt, and adds nothing. `release` ends a lease.
    What a lease holds is never evicted. Otherwise the run used least lately goes first, from its
    end, and only runs with nothing below them.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._tick = 0
        self._runs = 0
        self._found = self._added = self._evicted = 0
        self._reset()

    def _reset(self) -> None:
        self._roots: dict[Hashable, Run] = {}
        # Taken from the end: new runs get ascending slots.
        self._free: Slots = np.arange(self._slots - 1, -1, -1, dtype=np.int64)
        self._free_count = self._slots
        self._queue: list[tuple[int, int, Run]] = []
        self._serial = 0
        self._runs = 0

    def lease(self, tokens: Tokens, root: Hashable = None) -> Lease | None:
        """Find a prompt, uint32 [length], at least one token; add what is missing of it.

        Only what was leased under the same `root` is found. None where it needs more slots than can
        be freed now.
        """
        run, depth = self._find(tokens, root)
        found, missing = depth, tokens.size - depth
        if missing:
            if depth < run.end:
                run = self._split(run, depth)
            run.pins += 1  # not to be evicted for its own continuation
            there = self._make_room(missing)
            run.pins -= 1
            if not there:
                return None
            run = self._append(run, tokens[depth:].tobytes(), missing)
        self._found += found
        self._added += missing
        run.pins += 1
        return Lease(run, tokens.size, found)

    def hold(self, tokens: Tokens, root: Hashable = None) -> Lease:
        """A lease of the longest beginning of a prompt that is there; nothing is added."""
        run, depth = self._find(tokens, root)
        run.pins += 1
        return Lease(run, depth, depth)

    def release(self, leases: Iterable[Lease]) -> None:
        """End leases: what they hold may be evicted, unless another lease holds it too."""
        for lease in leases:
            lease.run.pins -= 1

    def commit(self, leases: Iterable[Lease]) -> None:
        """All that these leases hold is computed."""
        for lease in leases:
            run: Run | None = lease.run
            while run is not None and run.computed < run.size:
                run.computed = run.size
                run = run.parent

    def discard(self, leases: Iterable[Lease]) -> None:
        """Take out what is not computed of what these leases hold."""
        for lease in leases:
            run = lease.run
            while run.parent is not None:
                parent = run.parent
                if not run.children and run.computed < run.size:
                    self._cut(run, run.computed)
                run = parent

    def narrow(self, lease: Lease) -> None:
        """Let a lease hold its own positions only, and none that follow them in its run."""
        run = lease.last_run()
        if lease.end < run.end:
            run = self._split(run, lease.end)
        run.pins += 1
        lease.run.pins -= 1
        lease.run = run

    def forget(self, root: Hashable) -> None:
        """Forget what was leased under `root`; nothing may hold a lease of it."""
        above = self._roots.pop(root, None)
        for run in [] if above is None else list(self._walk(above)):
            assert not run.pins, "what is forgotten is leased"
            self._give_back(run.slots)
            run.parent = None  # the queue skips it
            run.children = {}
            self._runs -= 1

    def clear(self) -> None:
        """Forget everything, also what leases hold: there must be no use of them afterwards."""
        self._reset()

    def path(self, lease: Lease) -> Slots:
        """The slots of a lease's prompt, int64 [length]."""
        parts = []
        run, end = lease.last_run(), lease.end
        while run.parent is not None:
            parts.append(run.slots[: end - run.start])
            end, run = run.start, run.parent
        return np.concatenate(parts[::-1]) if parts else _NO_SLOTS

    @property
    def held(self) -> int:
        """How many slots are taken."""
        return self._slots - self._free_count

    @property
    def slots(self) -> int:
        """How many there are."""
        return self._slots

    @property
    def added(self) -> int:
        """Positions that `lease` did not find, since the trie was made."""
        return self._added

    @property
    def evicted(self) -> int:
        """Positions that made room for others, since the trie was made."""
        return self._evicted

    def statistics(self) -> TrieStatistics:
        """How full it is, and what it was used for."""
        pinned: set[Run] = set()
        for run in self._every_run():
            above: Run | None = run if run.pins else None
            while above is not None and above not in pinned:
                pinned.add(above)
                above = above.parent
        return TrieStatistics(
            slots=self._slots,
            runs=self._runs,
            held=self.held,
            pinned=sum(run.size for run in pinned),
            found=self._found,
            added=self._added,
            evicted=self._evicted,
        )

    def check(self) -> None:
        """Raise `AssertionError` where an invariant of this module is broken."""
        owned = [self._free[: self._free_count]]
        queued = [run for _, _, run in self._queue]
        assert len(queued) == len(set(queued)), "a run is queued twice"
        runs = 0
        for run in self._every_run():
            runs += 1
            parent = run.parent
            assert parent is not None
            assert run.size == run.slots.size > 0, "a run is empty or lacks slots"
            assert parent.children.get(run.raw[:TOKEN_BYTES]) is run, "a run is not its parent's"
            assert run.start == parent.end, "a run begins elsewhere than its parent ends"
            assert 0 <= run.computed <= run.size, "more is computed than there is"
            if parent.computed < parent.size:
                assert run.computed == 0, "a run is computed and its parent is not"
            assert run.pins >= 0, "a run was released more often than leased"
            assert run.used <= parent.used or parent.parent is None, "a run outlives its parent"
            assert run.queued == (run in queued), "a run is queued and does not know"
            assert run.queued or run.children, "a run without runs below is not queued"
            owned.append(run.slots)
        assert runs == self._runs, "runs are miscounted"
        every = np.sort(np.concatenate(owned))
        assert np.array_equal(every, np.arange(self._slots)), "a slot is lost or owned twice"

    def _find(self, tokens: Tokens, root: Hashable = None) -> tuple[Run, int]:
        """The run in which these tokens end or leave the trie, and the depth where they do."""
        run = self._roots.get(root)
        if run is None:
            run = self._roots[root] = Run(None, 0, b"", _NO_SLOTS)
        raw, at = tokens.tobytes(), 0
        tick = self._tick = self._tick + 1
        while at < len(raw):
            below = run.children.get(raw[at : at + TOKEN_BYTES])
            if below is None:
                break
            run = below
            run.used = tick
            known = run.raw
            if not raw.startswith(known, at):
                at += _common(known, raw[at : at + len(known)])
                break
            at += len(known)
        return run, at // TOKEN_BYTES

    def _append(self, run: Run, raw: bytes, count: int) -> Run:
        """Continue a run by the bytes of `count` tokens; there must be room."""
        slots = self._take(count)
        if not run.children and not run.pins and run.parent is not None:
            run.raw += raw
            run.slots = np.concatenate((run.slots, slots))
            return run
        added = Run(run, run.end, raw, slots)
        added.used = self._tick
        run.children[raw[:TOKEN_BYTES]] = added
        self._runs += 1
        self._enqueue(added)
        return added

    def _split(self, run: Run, depth: int) -> Run:
        """Part a run at `depth`, inside it; return the new run of what is above.

        What is below stays the same object, so that leases go on holding all they held.
        """
        parent, cut = run.parent, depth - run.start
        assert parent is not None
        above, below = run.raw[: cut * TOKEN_BYTES], run.raw[cut * TOKEN_BYTES :]
        # Copies, or the parts would keep the whole alive.
        upper = Run(parent, run.start, above, run.slots[:cut].copy())
        upper.used = run.used
        upper.computed = min(run.computed, cut)
        parent.children[above[:TOKEN_BYTES]] = upper
        run.raw, run.slots = below, run.slots[cut:].copy()
        run.start, run.parent = depth, upper
        run.computed = max(0, run.computed - cut)
        upper.children[below[:TOKEN_BYTES]] = run
        self._runs += 1
        return upper

    def _make_room(self, wanted: int) -> bool:
        """Evict until `wanted` slots are free; False where leases hold too much for that."""
        if wanted > self._slots:
            return False
        held: list[Run] = []
        while self._free_count < wanted and self._queue:
            used, _, run = heapq.heappop(self._queue)
            run.queued = False
            if run.parent is None or run.children:
                continue
            if run.pins:
                held.append(run)
            elif run.used > used:
                self._enqueue(run)
            else:
                short = wanted - self._free_count
                kept = max(0, run.size - short)
                self._evicted += run.size - kept
                self._cut(run, kept)
                if kept:
                    self._enqueue(run)
        for run in held:
            self._enqueue(run)
        return self._free_count >= wanted

    def _cut(self, run: Run, kept: int) -> None:
        """Free all but the first `kept` slots of a run without runs below."""
        self._give_back(run.slots[kept:])
        parent = run.parent
        assert parent is not None
        if kept:
            run.raw, run.slots = run.raw[: kept * TOKEN_BYTES], run.slots[:kept].copy()
            run.computed = min(run.computed, kept)
            return
        del parent.children[run.raw[:TOKEN_BYTES]]
        run.parent = None
        self._runs -= 1
        if not parent.children and parent.parent is not None:
            self._enqueue(parent)

    def _give_back(self, slots: Slots) -> None:
        self._free[self._free_count : self._free_count + slots.size] = slots[::-1]
        self._free_count += slots.size

    def _take(self, count: int) -> Slots:
        self._free_count -= count
        return self._free[self._free_count : self._free_count + count][::-1].copy()

    def _enqueue(self, run: Run) -> None:
        if run.queued:
            return
        run.queued = True
        self._serial += 1
        heapq.heappush(self._queue, (run.used, self._serial, run))
        if len(self._queue) > 2 * self._runs + 64:  # of runs that were taken out
            self._queue = [entry for entry in self._queue if entry[2].parent is not None]
            heapq.heapify(self._queue)

    def _every_run(self) -> Iterator[Run]:
        for root in self._roots.values():
            yield from self._walk(root)

    def _walk(self, root: Run) -> Iterator[Run]:
        """The runs below a root."""
        below: Sequence[Run] = list(root.children.values())
        while below:
            yield from below
            below = [child for run in below for child in run.children.values()]


def _common(one: bytes, other: bytes) -> int:
    """Of how many bytes the tokens are with which two begin alike."""
    size = min(len(one), len(other))
    differs = np.frombuffer(one[:size], np.uint32) != np.frombuffer(other[:size], np.uint32)
    first = int(differs.argmax())
    return first * TOKEN_BYTES if differs[first] else size
