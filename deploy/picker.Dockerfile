# The endpoint picker, for engines in which nothing is installed. From the root of a checkout:
#   make dist
#   docker build -f deploy/picker.Dockerfile -t semmoe-picker .
FROM python:3.12-slim
COPY dist/*.whl /tmp/semmoe/
RUN set -e; wheel=$(ls /tmp/semmoe/*.whl); python -m pip install --no-cache-dir "${wheel}[gateway]"; rm -r /tmp/semmoe
USER 65534:65534
# numba keeps what it compiles there
ENV NUMBA_CACHE_DIR=/tmp/numba
EXPOSE 9002
ENTRYPOINT ["semmoe", "picker"]
