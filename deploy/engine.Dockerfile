# SGLang or vLLM with semmoe's plug-in. From the root of a checkout:
#   make dist
#   docker build -f deploy/engine.Dockerfile -t semmoe-sglang .
#   docker build -f deploy/engine.Dockerfile -t semmoe-vllm --build-arg BASE=vllm/vllm-openai:v0.32.0 .
ARG BASE=lmsysorg/sglang:v0.5.23
FROM ${BASE}
COPY dist/*.whl /tmp/semmoe/
# The engine has all that the plug-in needs; what it pins stays as it is.
RUN python3 -m pip install --no-cache-dir /tmp/semmoe/*.whl && rm -r /tmp/semmoe
# A plan and the model are mounted read-only; counters and recordings go to the control folder.
VOLUME /control
EXPOSE 30000
ENTRYPOINT ["semmoe", "serve"]
