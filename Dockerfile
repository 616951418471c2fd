# Images of workers and of jobs on the spot: Beam's boot program, the locked packages and dpstream
# on a plain Python.  Beam's own image is not built upon: it has Beam's test tools and a Cloud SDK.
#   docker build $(python deploy/images.py build-args) --target worker -t dpstream:0.1.0 .
# The stages `dataflow` and `launcher` are for Dataflow.
ARG PYTHON_IMAGE
ARG BEAM_SDK_IMAGE
ARG LAUNCHER_BASE_IMAGE

FROM ${BEAM_SDK_IMAGE} AS beam

FROM ${LAUNCHER_BASE_IMAGE} AS launcher-base

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY deploy/build.lock ./
RUN pip install --no-cache-dir --require-hashes -r build.lock
COPY pyproject.toml setup.py README.md LICENSE ./
COPY dpstream dpstream
COPY accounting accounting
COPY state state
COPY dp_transforms dp_transforms
COPY pipelines pipelines
# Not isolated: the build uses the tools of the lock, and fetches nothing.
RUN pip wheel --no-cache-dir --no-index --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS base
COPY deploy/runtime.lock /tmp/runtime.lock
RUN pip install --no-cache-dir --require-hashes -r /tmp/runtime.lock && rm /tmp/runtime.lock
COPY --from=build /wheels /tmp/wheels
RUN pip install --no-cache-dir --no-index --no-deps /tmp/wheels/*.whl && rm -r /tmp/wheels
COPY --from=beam /opt/apache/beam/boot /opt/apache/beam/LICENSE /opt/apache/beam/NOTICE /opt/apache/beam/
# Workers run with the packages above: boot makes no environment of its own.  Compiled functions are
# kept where any user can write (`docker run --user`).
ENV RUN_PYTHON_SDK_IN_DEFAULT_ENVIRONMENT=1 NUMBA_CACHE_DIR=/tmp/numba MPLCONFIGDIR=/tmp/matplotlib
# The user of all but Dataflow's images; the number is also in compose.yaml and deploy/flink.  It has
# a name, because boot ends at once under a number that the image does not know.
RUN groupadd --gid 10001 dpstream && useradd --uid 10001 --gid 10001 --create-home dpstream \
 && install --directory --owner=dpstream --group=dpstream /releases
# An image that cannot start a job is not built.  What root compiled here is taken away again:
# another user could not write beside it.
RUN dpstream doctor && python -c "import dpstream.state.spanner.store, dpstream.dp_transforms.flow" \
 && rm -rf /tmp/numba /tmp/matplotlib
# Beam's boot program: the image serves as a worker as it is, and
# `docker run --entrypoint dpstream IMAGE run` runs a job on the spot.
ENTRYPOINT ["/opt/apache/beam/boot"]

# Dataflow mounts folders of root's into its workers and the launcher, and writes logs there
# (/var/opt/google, /var/log/dataflow): these two run as root, each in a machine of its own.
FROM base AS dataflow
USER 0:0

FROM base AS launcher
# A launch needs Beam's clients of Google's services, which workers do not.
COPY deploy/dataflow/launcher.lock /tmp/launcher.lock
RUN pip install --no-cache-dir --require-hashes -r /tmp/launcher.lock && rm /tmp/launcher.lock
# Dataflow's own start program for flex templates; it runs the file named below and ends with it.
COPY --from=launcher-base /opt/google/dataflow/python_template_launcher /opt/google/dataflow/python_template_launcher
COPY deploy/dataflow/launcher.py /template/launcher.py
ENV FLEX_TEMPLATE_PYTHON_PY_FILE=/template/launcher.py
USER 0:0
ENTRYPOINT ["/opt/google/dataflow/python_template_launcher"]

FROM base AS worker
USER 10001:10001
