# An image with the command oomguard, for CPUs or for CUDA cards.
#
#   docker build -t oomguard .
#   docker build -t oomguard-cuda --build-arg BASE=nvidia/cuda:12.9.1-base-ubuntu24.04 .
#
# pip's usual torch for Linux brings its own CUDA libraries, so the base needs none. For a smaller image without them,
# give an index of packages that has torch's CPU builds as --build-arg PIP_EXTRA_INDEX_URL=URL.
ARG BASE=python:3.12-slim
FROM ${BASE}

# images of CUDA have no Python; the others keep theirs
RUN python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || \
    { apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*; }

ARG PIP_EXTRA_INDEX_URL=
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY oomguard oomguard
RUN python3 -m venv /opt/oomguard && \
    /opt/oomguard/bin/pip install --no-cache-dir -c constraints.txt '.[postgresql]' && \
    rm -rf /src/build /src/*.egg-info

# a user without rights: results belong to whoever is given by `docker run --user`
RUN useradd --create-home oomguard
USER oomguard
ENV PATH=/opt/oomguard/bin:$PATH
WORKDIR /work
ENTRYPOINT ["oomguard"]
CMD ["--help"]
