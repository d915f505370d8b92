# dualview in a container, run by a user without privileges.
#
#   docker build -t dualview .
#   docker build -t dualview --build-arg TORCH=cu128 .            a GPU: then `docker run --gpus all`
#   docker build -t dualview --build-arg EXTRAS=hub,lm-eval .     with extras
#   docker run --rm -v dualview:/home/dualview dualview run --out out
#
# The volume keeps the fetched model, the results, and what is in the cache of the hub.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src ./src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG TORCH=cpu
ARG EXTRAS=xarray
COPY --from=build /src/constraints.txt /wheels/
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --constraint /wheels/constraints.txt \
        --extra-index-url "https://download.pytorch.org/whl/${TORCH}" torch \
    && pip install --no-cache-dir --constraint /wheels/constraints.txt "$(ls /wheels/*.whl)[${EXTRAS}]" \
    && useradd --create-home --uid 1000 dualview
USER 1000
WORKDIR /home/dualview
ENV MPLBACKEND=agg HF_HUB_DISABLE_TELEMETRY=1
ENTRYPOINT ["dualview"]
CMD ["doctor"]
