FROM python:3.13-slim AS build
WORKDIR /src
COPY pyproject.toml requirements.lock README.md LICENSE ./
RUN python -m venv /opt/kvlane && /opt/kvlane/bin/pip install --no-cache-dir -r requirements.lock
COPY proxy proxy
RUN /opt/kvlane/bin/pip install --no-cache-dir --no-deps .
# docker build --build-arg EXTRAS=redis,jwt .
ARG EXTRAS=
RUN if [ -n "$EXTRAS" ]; then /opt/kvlane/bin/pip install --no-cache-dir ".[$EXTRAS]"; fi

FROM python:3.13-slim
COPY --from=build /opt/kvlane /opt/kvlane
COPY config /etc/kvlane
ENV PATH=/opt/kvlane/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --system --uid 10001 kvlane
USER kvlane
EXPOSE 8000
# Alive is what the orchestrator restarts on; readiness is /readyz.
HEALTHCHECK --interval=5s --timeout=2s --start-period=10s \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9190/healthz', timeout=1)"]
ENTRYPOINT ["kvlane"]
# docker run -p 8000:8000 kvlane serve --pod http://vllm-0:8000 --pod http://vllm-1:8000
CMD ["--help"]
