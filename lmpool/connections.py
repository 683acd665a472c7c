"""A connection that one thread has for itself, at the price of its commands.

redis-py keeps books of its connections under a lock, checks arguments that nobody gives, and wraps
each command in a retry, also where there is none: half of what a small command costs.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import hiredis
import redis
import redis.client
import redis.exceptions

from lmpool.commands import Values
from lmpool.interrupts import frees, is_its_own
from lmpool.rows import PackedRow
from lmpool.sockets import is_near

BEHIND_MOST: Final = 4
"""Values that are asked for behind one blocking read."""


_NUMBERS: Final = frozenset((int, float))


class OneConnectionPool(redis.ConnectionPool):
    """A pool of a single connection, which is never lent to two: it stays taken."""

    def reset(self) -> None:
        """Begin anew: in a forked child, too."""
        super().reset()
        self._one: Any = None

    def get_connection(self, *unused: object, **options: object) -> Any:
        """The connection, connected, without anything on it that nobody asked for.

        Raises redis-py's exceptions.
        """
        if self.pid != os.getpid():
            self._checkpid()
        connection: Any = self._one
        if connection is None:
            with self._lock:
                connection = self._one = self.make_connection()
                self._in_use_connections.add(connection)
        if connection._sock is None:
            connection.connect()
        try:
            if not connection._parser.can_read(0):
                return connection
        except (redis.exceptions.ConnectionError, OSError):
            pass  # the server ended it
        connection.disconnect()
        connection.connect()
        if connection.can_read():
            raise redis.exceptions.ConnectionError("the server says something before it is asked")
        return connection

    def release(self, connection: Any) -> None:
        """It stays."""


class OneConnectionClient(redis.Redis):
    """redis-py's client of such a pool. Nothing is retried.

    Entries that XREADGROUP brings are as the server says them: mostly they are many, and a dict for
    each takes longer than all that is read of it.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.response_callbacks.pop("XREADGROUP")
        self._blocked: Any = None
        """The connection, while its thread waits for what a blocking read brings."""
        self._wanted: list[str] = []
        """Keys that were asked for behind it."""
        self._asking = threading.RLock()
        """Of both."""
        self._end: Any = None
        """The socket that was last looked at, and `_end_is_near` what was found."""
        self._end_is_near = False
        self.behind: Mapping[str, bytes | None] = {}
        """What the last blocking read brought by `get_behind`, by key."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command, read its reply. Raises redis-py's exceptions."""
        options.pop("keys", None)  # for redis-py's own cache
        if options:

            def read_as_said(connection: Any) -> Any:
                return self.parse_response(connection, args[0], **options)  # type: ignore[no-untyped-call]

            return self._ask(args, read_as_said)
        reply = self._ask(args, _read)
        read = self.response_callbacks.get(args[0])
        return reply if read is None else read(reply)

    def values(
        self, keys: Sequence[str], sizes: Sequence[int], rooms: Sequence[PackedRow | None] = ()
    ) -> Values:
        """MGET of large values whose sizes are known, received into memory of their own, or into
        their `rooms`: the header that a row is to have, and memory for its numbers.

        Where one is of another size, or none, all are read in more steps. Raises redis-py's
        exceptions.
        """

        def read(connection: Any) -> Any:
            connection._parser.expect_values(sizes, rooms)
            return connection.read_response()

        found: Values = self._ask(("MGET", *keys), read)
        return found

    def xread(self, streams: Any, count: int | None = None, block: int | None = None) -> Any:
        """As redis-py's. While it blocks, others may `get_behind` it."""
        if block is None:
            return super().xread(streams, count=count)
        most = [] if count is None else ["COUNT", count]
        command = ["XREAD", *most, "BLOCK", block, "STREAMS", *streams, *streams.values()]
        reply = self._ask(command, self._read_blocked)
        return self.response_callbacks["XREAD"](reply)

    def _read_blocked(self, connection: Any) -> Any:
        with self._asking:
            self._blocked, self._wanted, self.behind = connection, [], {}
        reply: Any = None
        refusal: redis.exceptions.ResponseError | None = None
        try:
            # Not ended before nobody asks: its number might be another socket's at once.
            reply = connection.read_response(disconnect_on_error=False)
        except redis.exceptions.ResponseError as error:
            refusal = error  # what is behind it is answered all the same
        finally:
            with self._asking:  # from now on nobody asks
                self._blocked, wanted = None, self._wanted
        self.behind = {key: _read_value(connection) for key in wanted}
        if refusal is not None:
            raise refusal
        return reply

    @frees("_asking")
    def get_behind(self, key: str) -> None:
        """Ask for a value behind the blocking read that the connection's thread waits for: it comes
        together with what that brings, without another round trip. For any thread; never waits.

        Where none waits, or enough is asked for, nothing is done.
        """
        command: Any = ("GET", key)
        packed: bytes = hiredis.pack_command(command)
        with self._asking:
            connection = self._blocked
            if connection is None or len(self._wanted) >= BEHIND_MOST:
                return
            if not connection._parser.is_plain:  # what TLS is in the middle of is its thread's
                return
            socket_there = connection._sock
            if socket_there is None:
                return
            sent = 0
            try:
                self._wanted.append(key)
                # Past the socket's timeout, which it would wait for.
                sent = os.write(socket_there.fileno(), packed)
            except OSError as error:
                if not is_its_own(error):
                    raise
                if isinstance(error, BlockingIOError):
                    self._wanted.pop()
                    sent = len(packed)  # all that there is to be sent
            finally:  # Ctrl-C comes in between, too
                if sent < len(packed):  # nobody could go on behind a part of it
                    with suppress(OSError):
                        socket_there.shutdown(socket.SHUT_RDWR)

    def _ask(self, command: Sequence[Any], read: Callable[[Any], Any]) -> Any:
        pool: Any = self.connection_pool
        connection = pool.get_connection()
        try:
            connection.send_packed_command(packed(connection, command))
            return read(connection)
        except redis.exceptions.ResponseError:
            raise  # which was the reply
        except BaseException:
            # The reply may come yet, and would be taken for the next command's: redis-py leaves
            # this to its client where Sentinels name the server.
            connection.disconnect()
            raise
        finally:
            pool.release(connection)

    def may_go_ahead(self) -> bool:
        """Whether another thread may send a command by `ahead`: there is a connection, and nothing
        on it. While that thread asks, the one whose this is rests."""
        pool: Any = self.connection_pool
        return self.is_plain and not pool._one._parser.can_read(0)

    @property
    def is_plain(self) -> bool:
        """Whether another thread may ever send a command by `ahead` on the connection that there
        is: TLS's state is its own thread's."""
        pool = self.connection_pool
        connection = pool._one if isinstance(pool, OneConnectionPool) else None
        return connection is not None and bool(connection._sock) and connection._parser.is_plain

    @property
    def is_near(self) -> bool:
        """Whether the server that it is connected to runs on this machine, as far as its address
        says."""
        pool: Any = self.connection_pool
        end = pool._one._sock
        if end is not self._end:
            self._end, self._end_is_near = end, is_near(end)
        return self._end_is_near

    def ahead(self, command: Sequence[Any]) -> CommandAhead:
        """A command, ready to be sent by a thread that may go ahead."""
        pool: Any = self.connection_pool
        return CommandAhead(pool._one, hiredis.pack_command(_words(command)))

    def pipeline(self, transaction: Any = True, shard_hint: Any = None) -> OwnWordsPipeline:
        """Commands sent together; with `transaction` as one MULTI."""
        return OwnWordsPipeline(  # type: ignore[no-untyped-call]
            self.connection_pool, self.response_callbacks, transaction, shard_hint
        )


def packed(connection: Any, command: Sequence[Any]) -> list[bytes]:
    """A command as it is sent. Raises redis-py's exceptions for what none may hold."""
    if " " not in command[0]:
        try:
            return [hiredis.pack_command(_words(command))]
        except TypeError:
            pass  # redis-py says of what
    pieces: list[bytes] = connection.pack_command(*command)
    return pieces


def _words(command: Sequence[Any]) -> tuple[Any, ...]:
    # hiredis ends the process where Ctrl-C comes while it writes a number.
    if _NUMBERS.isdisjoint(map(type, command)):
        return tuple(command)
    return tuple([str(word) if type(word) in _NUMBERS else word for word in command])


def _read(connection: Any) -> Any:
    return connection.read_response()


def _read_value(connection: Any) -> bytes | None:
    try:
        value: bytes | None = connection.read_response()
    except redis.exceptions.ResponseError:  # it may not be read, or is no string
        return None
    return value


class CommandAhead:
    """A command that one thread sends and another reads the reply to."""

    def __init__(self, connection: Any, packed: bytes) -> None:
        self._connection = connection
        self._left: bytes | None = packed
        """What is to be sent yet; None where nobody knows."""

    def send(self) -> None:
        """Send as much as leaves without waiting. Errors are those of `reply`."""
        packed, self._left = self._left, None
        assert packed is not None
        try:
            # Past the socket's timeout, which it would wait for.
            self._left = packed[os.write(self._connection._sock.fileno(), packed) :]
        except OSError as error:
            if not is_its_own(error):
                raise
            if isinstance(error, BlockingIOError):
                self._left = packed

    @property
    def is_sent(self) -> bool:
        """Whether all of it has left."""
        return self._left == b""

    def is_answered(self, waits: Callable[[int], bool]) -> bool:
        """Whether the reply begins to come, as `waits` finds out of the socket's number, or an
        error; not before it has been sent as a whole. For the connection's own thread."""
        end = self._connection._sock
        if self._left is None or end is None:
            return True
        if self._left or not waits(end.fileno()):
            return False
        try:
            self._connection._parser.take_in()
        except OSError:
            pass  # `reply` meets it, too
        return True

    def reply(self) -> Any:
        """Send the rest, read the reply; for the connection's own thread. Raises redis-py's
        exceptions."""
        connection = self._connection
        try:
            if self._left is None or connection._sock is None:
                raise redis.exceptions.ConnectionError("it ended while it was written to")
            if self._left:
                # Its own rest: no PING of a health check may come between.
                connection.send_packed_command([self._left], check_health=False)
            return connection.read_response()
        except redis.exceptions.ResponseError:
            raise  # which was the reply
        except BaseException:
            connection.disconnect()
            raise


class OwnWordsPipeline(redis.client.Pipeline):
    """A pipeline whose errors are the server's own words.

    redis-py puts the whole command before them, a job's tokens with it: neither would an error be
    known by its first word, nor is that for a log.
    """

    def annotate_exception(self, exception: Exception, number: int, command: object) -> None:
        """Leave it as it is."""

    def send(self) -> None:
        """Send the commands, and leave what is answered for `answers`: meanwhile the connection
        serves for nothing else. Raises redis-py's exceptions."""
        pool: Any = self.connection_pool
        connection = pool.get_connection()
        commands = [command for command, _ in self.command_stack]
        try:
            connection.send_packed_command(connection.pack_commands(commands))
        except BaseException:
            connection.disconnect()
            raise

    def answers(self, refusals: tuple[type[Exception], ...]) -> list[Any]:
        """What is answered to what was sent, refusals of these kinds among it.

        Raises redis-py's exceptions where anything else comes: then nothing more is read.
        """
        pool: Any = self.connection_pool
        found: list[Any] = []
        try:
            for (name, *_), options in self.command_stack:
                try:
                    answer = pool._one.read_response(disconnect_on_error=False)
                except refusals as error:
                    found.append(error)
                else:
                    options.pop("keys", None)  # for redis-py's own cache
                    read = self.response_callbacks.get(name)
                    found.append(answer if read is None else read(answer, **options))
        except BaseException:
            self.drop()
            raise
        return found

    def drop(self) -> None:
        """Read no answers; their connection is of no further use."""
        self.connection_pool.disconnect()
