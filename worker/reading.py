"""Jobs as a worker reads them: each is of its pool, and its digest is its prompt's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from lmpool.commands import fields_of
from lmpool.errors import JobFormatError
from lmpool.wants import Digester
from lmpool.wire import Job, JobReader, RefusedJob, unpack_job

logger = logging.getLogger(__name__)


def job_in(fields: Sequence[bytes] | None) -> bytes:
    """What an entry holds of a job."""
    if fields and len(fields) == 2 and fields[0] == b"job":
        return fields[1]
    return fields_of(fields or ()).get(b"job", b"")


def read_jobs(
    entries: Sequence[bytes], digester: Digester, reader: JobReader
) -> list[Job | JobFormatError]:
    """Of each entry the job, as `read_job` reads it, or the error that this raises."""
    found: list[Job | JobFormatError] = []
    while len(found) < len(entries):
        known = reader.read_known(entries, len(found))
        if known:
            first = known[0]
            digests = digester.digests(first.want, [job.tokens for job in known], first.adapter)
            for job, digest in zip(known, digests, strict=True):
                found.append(job if job.digest == digest else _not_its_digest(job))
            continue
        try:
            found.append(read_job(entries[len(found)], digester, reader.read))
        except JobFormatError as error:
            found.append(error)
    return found


def read_job(data: bytes, digester: Digester, unpack: Callable[[bytes], Job] = unpack_job) -> Job:
    """A job of this pool from an entry of its stream. Raises `JobFormatError`."""
    try:
        job = unpack(data)
        digest = digester.digest(job.want, job.tokens, job.adapter)
    except JobFormatError:
        raise
    except Exception as error:  # what no reader of ours foresees must not stop the others
        logger.exception("an entry of the job stream cannot be read")
        raise JobFormatError(f"{type(error).__name__}: {error}") from None
    # A digest that is not its prompt's would put a row under another prompt's key.
    if digest != job.digest:
        raise _not_its_digest(job)
    return job


def _not_its_digest(job: Job) -> RefusedJob:
    return RefusedJob("the digest is not the one of this prompt for this pool's model", job.digest)
