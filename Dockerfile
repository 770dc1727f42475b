# For x86-64 and arm64, also on a Mac with Apple silicon. No root inside. docs/install.md has the commands.
FROM debian:stable-slim
RUN apt-get update && apt-get install --yes --no-install-recommends \
        ca-certificates git libgomp1 $(dpkg --print-architecture | sed -n s/amd64/libquadmath0/p) make python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home learner
USER learner
RUN mkdir /home/learner/gluon_mgpu
WORKDIR /home/learner/gluon_mgpu
COPY --chown=learner . .
RUN make dev && .venv/bin/python scripts/train.py --dataset synthetic --limit 600 --epochs 1
CMD ["make", "train"]
