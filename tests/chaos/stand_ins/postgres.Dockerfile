# A stand-in for PostgreSQL's public image, where no registry can be reached: Debian's server, with
# what of that image the stack relies on. What must not live here: anything about the stack.
ARG BASE
FROM ${BASE}
RUN groupadd --gid 999 postgres && useradd --uid 999 --gid 999 --home-dir /var/lib/postgresql postgres \
    && apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends postgresql \
    && ln -s /usr/lib/postgresql/*/bin/* /usr/local/bin \
    && install -d -o 999 -g 999 -m 700 /var/lib/postgresql/data
ENV PGDATA=/var/lib/postgresql/data
VOLUME /var/lib/postgresql/data
COPY --chmod=0555 postgres.sh /usr/local/bin/docker-entrypoint.sh
ENTRYPOINT ["docker-entrypoint.sh"]
CMD ["postgres", "-c", "listen_addresses=*"]
