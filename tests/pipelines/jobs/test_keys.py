"""The public key list: a set of typed rows, told by its digest; errors show a line's number."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.fields import Field
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.keys import public_key_digest, read_public_keys
from dpstream.pipelines.project.job_parts import KeysConfig

FIELDS = (Field("city"), Field("zone", "int"))


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_digest_is_of_the_set_of_keys(tmp_path: Path) -> None:
    one = public_key_digest(written(tmp_path / "a.csv", "city,zone\nx,1\ny,2\n"), FIELDS)
    same = written(tmp_path / "b.csv", "\ufeffzone,more,city\n2,?,y\n1,?,x\n1,!,x\n")
    assert public_key_digest(same, FIELDS) == one
    other = public_key_digest(written(tmp_path / "c.csv", "city,zone\nx,1\ny,3\n"), FIELDS)
    text = public_key_digest(tmp_path / "a.csv", (Field("city"), Field("zone", "string")))
    assert len({one, other, text}) == 3


@pytest.mark.parametrize(
    "text",
    ["", "city\nx\n", "city,zone,city\nx,1,x\n", "city,zone\n", "city,zone\nx,01\n",
     "city,zone\nx,SECRET\n", "city,zone\nx,9223372036854775808\n", 'city,zone\n"x,1\n'],
)  # fmt: skip
def test_what_is_no_list(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        public_key_digest(written(tmp_path / "keys.csv", text), FIELDS)
    assert error.value.field == "public_keys" and "SECRET" not in str(error.value)


def test_a_job_reads_the_list_that_it_was_planned_with(
    tmp_path: Path, make_job: Callable[..., Job]
) -> None:
    job, path = make_job(), written(tmp_path / "keys.csv", "key\nb\na\nb\n")
    with pytest.raises(UsageError):
        read_public_keys(job)
    plan = msgspec.structs.replace(job.plan, public_keys=public_key_digest(path, job.plan.key))
    job = msgspec.structs.replace(job, keys=KeysConfig(str(path)), plan=plan)
    assert read_public_keys(job).to_pydict() == {"key": ["a", "b"]}
    written(path, "key\na\n")
    with pytest.raises(PolicyError) as error:
        read_public_keys(job)
    assert error.value.field == "public_keys"
