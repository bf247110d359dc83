# The dispatcher's image: docs/how-to/install.md says how to build and run it.
#
# BASE is the Debian that the image is built in, with its digest, which only you can look up (docs/how-to/install.md says
# how); a tag alone would build something else tomorrow. Debian 13, python3 3.13:
#     docker build --build-arg BASE=debian:trixie-slim@sha256:… -t batch-dispatcher .
ARG BASE

FROM ${BASE} AS build
ARG BASE
RUN case "$BASE" in *@sha256:*) ;; *) echo "BASE=$BASE: name it with its digest, …@sha256:…" >&2; exit 1 ;; esac
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        binutils ca-certificates python3 python3-venv
WORKDIR /src
COPY pyproject.toml constraints.txt ./
COPY deploy/image.py deploy/sbom.py deploy/
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf python3 deploy/image.py packages
COPY README.md LICENSE ./
COPY dispatcher dispatcher
RUN python3 deploy/image.py root /root-of-image && mkdir --parents /volumes/data

# docker build --target sbom --output . …: the bill of materials as a file
FROM scratch AS sbom
COPY --from=build /root-of-image/usr/share/doc/batch-dispatcher/sbom.cdx.json /

FROM scratch
ARG BASE
ARG VERSION=0.3.0
LABEL org.opencontainers.image.title="batch-dispatcher" \
    org.opencontainers.image.description="Fills the idle capacity of LLM inference pools with batch requests" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.base.name="${BASE}"
COPY --from=build /root-of-image /
# Where a volume goes, for the data of an embedded queue; a new one takes this directory's owner.
COPY --from=build --chown=65532:65532 /volumes /
WORKDIR /data
# Every verb finds the file without a flag: `docker exec … status`.
ENV PATH=/opt/batch-dispatcher/bin LANG=C.UTF-8 BATCH_DISPATCHER_CONFIG=/etc/batch-dispatcher/config/config.yaml
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["/opt/batch-dispatcher/bin/batch-dispatcher"]
CMD ["run"]
