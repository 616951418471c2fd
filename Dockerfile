# Worker and launcher image: the Beam SDK container of the pinned version with dpstream inside.
FROM python:3.11-slim AS build
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir build && python -m build --wheel --outdir /wheels

FROM apache/beam_python3.11_sdk:2.77.0
COPY requirements.lock /tmp/requirements.lock
RUN pip install --no-cache-dir --require-hashes -r /tmp/requirements.lock
COPY --from=build /wheels /tmp/wheels
RUN pip install --no-cache-dir --no-deps /tmp/wheels/*.whl && rm -r /tmp/wheels
# The entry point stays Beam's boot program: the image serves as a worker as it is, and
# `docker run --entrypoint dpstream IMAGE run job.toml` runs a job on the spot.
