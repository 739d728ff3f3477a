/* A mock fleet that costs almost nothing, so that a measurement on two cores measures the proxy and not the engines.
 *
 *   gcc -O2 -o mockengine mockengine.c
 *   ./mockengine [-n PODS] [-b KV_BLOCKS]
 *
 * One process listens on PODS ports of the kernel's choice and prints them on one line. It speaks keep-alive HTTP/1.1
 * on loopback. A POST to .../completions with "stream":true is answered with `max_tokens` (or `max_completion_tokens`,
 * else 64) server-sent events, one every `seed` microseconds (0 or none: at once, each in a write of its own), then
 * [DONE]; any other POST with a canned chat completion. GET /metrics is the part of a vLLM exposition that routers
 * read, GET .../models lists one model "m", GET /count is {"requests", "events", "streaming"}: completions asked for
 * and events sent so far, streams under way. Any other GET is {}.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct conn {
    int fd, listening, streaming, sent, events;
    unsigned long long interval, next;
    char *buf;
    size_t len, cap;
    struct conn *before, *after;
} conn;

static conn *streams;
static unsigned long long requests, events_sent;
static long streams_open;
static char metrics[1024];

static const char MODELS[] =
    "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":1,\"owned_by\":\"vllm\","
    "\"root\":\"m\",\"parent\":null,\"max_model_len\":131072}]}";
static const char COMPLETION[] =
    "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"m\",\"choices\":[{\"index\":0,"
    "\"message\":{\"role\":\"assistant\",\"content\":\"hello there, this is a canned answer\"},\"logprobs\":null,"
    "\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":12,\"total_tokens\":22,\"completion_tokens\":10}}";
static const char STREAM[] =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n";
static const char LAST[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";

static unsigned long long now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000ull + t.tv_nsec / 1000;
}

/* A reader that takes nothing for a second is cut off: it must not hold up the others. */
static void send_all(int fd, const char *s, size_t n) {
    while (n) {
        ssize_t k = send(fd, s, n, MSG_NOSIGNAL);
        if (k < 0) {
            struct pollfd writable = {.fd = fd, .events = POLLOUT};
            if (errno == EAGAIN && poll(&writable, 1, 1000) > 0) continue;
            shutdown(fd, SHUT_RDWR);
            return;
        }
        s += k;
        n -= k;
    }
}

static void answer(int fd, const char *type, const char *body) {
    char head[256];
    int n = snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %zu\r\n\r\n", type,
                     strlen(body));
    send_all(fd, head, n);
    send_all(fd, body, strlen(body));
}

static void answer_count(int fd) {
    char body[128];
    snprintf(body, sizeof body, "{\"requests\":%llu,\"events\":%llu,\"streaming\":%ld}", requests, events_sent,
             streams_open);
    answer(fd, "application/json", body);
}

static void send_event(conn *c) {
    char event[512], out[640];
    int n = snprintf(event, sizeof event,
                     "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,"
                     "\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" tok%d\"},\"logprobs\":null,"
                     "\"finish_reason\":null}]}\n\n",
                     c->sent++);
    int m = snprintf(out, sizeof out, "%x\r\n%s\r\n", n, event);
    send_all(c->fd, out, m);
    events_sent++;
}

static void enter_streams(conn *c) {
    c->streaming = 1;
    c->next = now_us() + c->interval;
    c->before = 0;
    c->after = streams;
    if (streams) streams->before = c;
    streams = c;
    streams_open++;
}

static void leave_streams(conn *c) {
    if (c->before) c->before->after = c->after;
    else streams = c->after;
    if (c->after) c->after->before = c->before;
    c->before = c->after = 0;
    c->streaming = 0;
    streams_open--;
}

static void drop(conn *c) {
    if (c->streaming) leave_streams(c);
    close(c->fd);
    free(c->buf);
    free(c);
}

static int holds(const char *s, size_t n, const char *word) { return memmem(s, n, word, strlen(word)) != 0; }

static long number(const char *s, size_t n, const char *key, long otherwise) {
    const char *at = memmem(s, n, key, strlen(key));
    return at ? atol(at + strlen(key)) : otherwise; /* the buffer ends with a zero byte */
}

static void start_stream(conn *c, const char *body, size_t n) {
    c->sent = 0;
    c->events = number(body, n, "\"max_tokens\":", number(body, n, "\"max_completion_tokens\":", 64));
    c->interval = number(body, n, "\"seed\":", 0);
    send_all(c->fd, STREAM, sizeof STREAM - 1);
    if (c->interval) {
        enter_streams(c);
        return;
    }
    while (c->sent < c->events) send_event(c);
    send_all(c->fd, LAST, sizeof LAST - 1);
}

/* Bytes of the first request in the buffer, its head in *head; 0 while it is not complete. */
static size_t complete(conn *c, size_t *head) {
    char *end = memmem(c->buf, c->len, "\r\n\r\n", 4);
    if (!end) return 0;
    *head = end - c->buf + 4;
    *end = 0;
    char *length = strcasestr(c->buf, "content-length:");
    int chunked = strcasestr(c->buf, "transfer-encoding: chunked") != 0;
    size_t total = *head + (length ? atoll(length + 15) : 0);
    *end = '\r';
    if (chunked) {
        char *last = memmem(c->buf + *head, c->len - *head, "0\r\n\r\n", 5);
        return last ? last - c->buf + 5 : 0;
    }
    return c->len < total ? 0 : total;
}

static void serve(conn *c) {
    size_t head, total;
    while (!c->streaming && (total = complete(c, &head))) {
        char *line = c->buf, *body = c->buf + head, kept = c->buf[total];
        size_t line_length = (char *)memchr(line, '\r', head) - line, n = total - head;
        c->buf[total] = 0;
        if (!strncmp(line, "GET", 3)) {
            if (holds(line, line_length, "/metrics")) answer(c->fd, "text/plain; version=0.0.4", metrics);
            else if (holds(line, line_length, "/models")) answer(c->fd, "application/json", MODELS);
            else if (holds(line, line_length, "/count")) answer_count(c->fd);
            else answer(c->fd, "application/json", "{}");
        } else {
            /* Some routers post the same body to .../completions/render first: that is no request of a client. */
            int completion = holds(line, line_length, "/completions ");
            requests += completion;
            if (completion && (holds(body, n, "\"stream\":true") || holds(body, n, "\"stream\": true")))
                start_stream(c, body, n);
            else answer(c->fd, "application/json", COMPLETION);
        }
        c->buf[total] = kept;
        memmove(c->buf, c->buf + total, c->len - total);
        c->len -= total;
    }
}

/* Whether the connection is still there. */
static int receive(conn *c) {
    for (;;) {
        if (c->cap - c->len < 16384) c->buf = realloc(c->buf, (c->cap *= 2) + 1);
        ssize_t k = recv(c->fd, c->buf + c->len, c->cap - c->len, 0);
        if (k <= 0) return k < 0 && errno == EAGAIN;
        c->len += k;
    }
}

static void watch(int poll, conn *c) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(poll, EPOLL_CTL_ADD, c->fd, &event);
}

static void accept_all(int poll, conn *listener) {
    int fd, one = 1;
    while ((fd = accept4(listener->fd, 0, 0, SOCK_NONBLOCK)) >= 0) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        conn *c = calloc(1, sizeof *c);
        c->fd = fd;
        c->cap = 1 << 16;
        c->buf = malloc(c->cap + 1);
        watch(poll, c);
    }
}

static int listen_anywhere(int poll) {
    conn *c = calloc(1, sizeof *c);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    c->listening = 1;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (bind(c->fd, (void *)&address, size) || listen(c->fd, 4096)) return perror("listen"), exit(1), 0;
    getsockname(c->fd, (void *)&address, &size);
    watch(poll, c);
    return ntohs(address.sin_port);
}

static void send_due(void) {
    unsigned long long now = now_us();
    for (conn *c = streams, *after; c; c = after) {
        after = c->after;
        while (c->streaming && c->next <= now) {
            if (c->sent < c->events) {
                send_event(c);
                c->next += c->interval;
                continue;
            }
            send_all(c->fd, LAST, sizeof LAST - 1);
            leave_streams(c);
            serve(c);
            break;
        }
    }
}

int main(int argc, char **argv) {
    int pods = 4, option;
    long blocks = 20000;
    while ((option = getopt(argc, argv, "n:b:")) != -1) {
        if (option == 'n') pods = atoi(optarg);
        else if (option == 'b') blocks = atol(optarg);
        else return 2;
    }
    snprintf(metrics, sizeof metrics,
             "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 0.0\n"
             "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine=\"0\",model_name=\"m\"} 1.0\n"
             "# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.1\n"
             "# TYPE vllm:cache_config_info gauge\n"
             "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"%ld\",engine=\"0\"} 1.0\n",
             blocks);
    int poll = epoll_create1(0);
    for (int i = 0; i < pods; i++) printf("%d ", listen_anywhere(poll));
    printf("\n");
    fflush(stdout);
    struct epoll_event ready[512];
    for (;;) {
        int n = epoll_wait(poll, ready, 512, streams ? 1 : -1);
        for (int i = 0; i < n; i++) {
            conn *c = ready[i].data.ptr;
            if (c->listening) accept_all(poll, c);
            else if (receive(c)) serve(c);
            else drop(c);
        }
        send_due();
    }
}
