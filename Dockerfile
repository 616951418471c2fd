# One image for workers, for a job on the spot, and (target `launcher`) for Dataflow's flex template:
# the Beam SDK container of the pinned version with dpstream inside.
#   docker build -t dpstream .
#   docker build -t dpstream-launcher --target launcher .
FROM python:3.11-slim AS build
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir build && python -m build --wheel --outdir /wheels

FROM apache/beam_python3.11_sdk:2.77.0 AS base
COPY requirements.lock /tmp/requirements.lock
RUN pip install --no-cache-dir --require-hashes -r /tmp/requirements.lock
COPY --from=build /wheels /tmp/wheels
RUN pip install --no-cache-dir --no-deps /tmp/wheels/*.whl && rm -r /tmp/wheels
# An image that cannot start a job is not built.
RUN dpstream doctor && python -c "import state.spanner, dp_transforms.flow"

FROM base AS launcher
# Dataflow's own start program for flex templates; it runs the file named below and ends with it.
COPY --from=gcr.io/dataflow-templates-base/python311-template-launcher-base:latest \
  /opt/google/dataflow/python_template_launcher /opt/google/dataflow/python_template_launcher
COPY deploy/dataflow/launcher.py /template/launcher.py
ENV FLEX_TEMPLATE_PYTHON_PY_FILE=/template/launcher.py
ENTRYPOINT ["/opt/google/dataflow/python_template_launcher"]

FROM base AS worker
# The entry point stays Beam's boot program: the image serves as a worker as it is, and
# `docker run --entrypoint dpstream IMAGE run job.toml` runs a job on the spot.
