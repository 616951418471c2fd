"""One thread while strategies are solved."""

from dpstream.accounting.strategies.cells.threads import blas_libraries, one_thread


def test_one_thread_and_then_as_before() -> None:
    reads = [get for get, _ in blas_libraries()]
    # Wheels of numpy and scipy bring an OpenBLAS each; another library is left alone.
    assert len(reads) == 2
    before = [get() for get in reads]
    with one_thread():
        assert [get() for get in reads] == [1, 1]
    assert [get() for get in reads] == before
