# The router, for engines in which nothing is installed. From the root of a checkout:
#   make dist
#   docker build -f deploy/router.Dockerfile -t semmoe-router .
FROM python:3.12-slim
COPY dist/*.whl /tmp/semmoe/
RUN set -e; wheel=$(ls /tmp/semmoe/*.whl); python -m pip install --no-cache-dir "${wheel}[serve]"; rm -r /tmp/semmoe
USER 65534:65534
# numba keeps what it compiles there
ENV NUMBA_CACHE_DIR=/tmp/numba
EXPOSE 8080
ENTRYPOINT ["semmoe", "router"]
