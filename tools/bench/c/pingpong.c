/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The floor under any request over TCP: two processes that send each other as many bytes as an
 * NBD read of a page takes, and do nothing else.
 *
 *     isw-bench-pingpong [--ms N] [--request-bytes 28] [--reply-bytes 4112]
 *                        [--receiver 0|1] [--poll 0|1] [--spin-us N]
 *
 * --receiver 1: the client receives on a thread of its own, as the engine does, and wakes the
 * thread that sends. "done" is then what the receiver sees, "round" what the sender sees.
 * --poll 1: the client waits in poll(2) before it receives. --spin-us: it first looks for so long
 * without waiting. Both show what a way of waiting costs, apart from all else.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "bench.h"

#define SAMPLES_MAX (4u << 20)
#define BYTES_MAX   (1u << 20)

struct client {
	int fd;
	uint32_t request_bytes, reply_bytes;
	bool polls;
	uint64_t spin_ns;
	uint64_t end_ns;
	struct bench_samples done, round;
	/* With a receiver: 0 none, 1 a reply has come. seq_cst, a futex. */
	atomic_uint arrived;
	uint64_t arrived_ns; /* published by arrived */
	unsigned char buffer[BYTES_MAX];
};

static int receive_all(int fd, unsigned char *buffer, uint32_t bytes)
{
	for (uint32_t got = 0; got < bytes;) {
		ssize_t n = recv(fd, buffer + got, bytes - got, 0);

		if (n == 0)
			return -1;
		if (n < 0 && errno != EINTR)
			bench_die("recv: %s", strerror(errno));
		if (n > 0)
			got += (uint32_t)n;
	}
	return 0;
}

/* As the client was told to wait. */
static void wait_for_reply(const struct client *c)
{
	struct pollfd fd = {.fd = c->fd, .events = POLLIN};
	uint64_t start_ns = c->spin_ns ? iswi_now_ns() : 0;
	unsigned char byte;

	while (c->spin_ns && iswi_now_ns() - start_ns < c->spin_ns)
		if (recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0)
			return;
	if (c->polls)
		poll(&fd, 1, -1);
}

static int receive_reply(struct client *c)
{
	wait_for_reply(c);
	return receive_all(c->fd, c->buffer, c->reply_bytes);
}

static void send_all(int fd, const unsigned char *buffer, uint32_t bytes)
{
	for (uint32_t sent = 0; sent < bytes;) {
		ssize_t n = send(fd, buffer + sent, bytes - sent, MSG_NOSIGNAL);

		if (n < 0)
			bench_die("send: %s", strerror(errno));
		sent += (uint32_t)n;
	}
}

static void no_delay(int fd)
{
	int one = 1;

	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
}

static void serve(int listener, uint32_t request_bytes, uint32_t reply_bytes)
{
	static unsigned char buffer[BYTES_MAX];
	int fd = accept(listener, NULL, NULL);

	bench_die_with_parent();
	if (fd < 0)
		exit(1);
	no_delay(fd);
	while (receive_all(fd, buffer, request_bytes) == 0)
		send_all(fd, buffer, reply_bytes);
	exit(0);
}

static void run_alone(struct client *c)
{
	uint64_t now_ns = iswi_now_ns();

	while (now_ns < c->end_ns) {
		uint64_t start_ns = now_ns;

		send_all(c->fd, c->buffer, c->request_bytes);
		if (receive_reply(c))
			bench_die("the other side ended");
		now_ns = iswi_now_ns();
		bench_samples_add(&c->done, now_ns - start_ns);
	}
}

static void *receiver(void *arg)
{
	struct client *c = arg;

	while (receive_reply(c) == 0) {
		c->arrived_ns = iswi_now_ns();
		atomic_store(&c->arrived, 1);
		syscall(SYS_futex, &c->arrived, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
	}
	return NULL;
}

static void run_with_receiver(struct client *c)
{
	static const unsigned char request[BYTES_MAX];
	uint64_t now_ns = iswi_now_ns();
	pthread_t thread;

	if (pthread_create(&thread, NULL, receiver, c))
		bench_die("no thread");
	while (now_ns < c->end_ns) {
		uint64_t start_ns = now_ns;

		atomic_store(&c->arrived, 0);
		send_all(c->fd, request, c->request_bytes);
		while (!atomic_load(&c->arrived))
			syscall(SYS_futex, &c->arrived, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0);
		now_ns = iswi_now_ns();
		bench_samples_add(&c->done, c->arrived_ns - start_ns);
		bench_samples_add(&c->round, now_ns - start_ns);
	}
	shutdown(c->fd, SHUT_RDWR);
	pthread_join(thread, NULL);
}

static int dial(uint32_t request_bytes, uint32_t reply_bytes, pid_t *child_out)
{
	struct sockaddr_in address = {.sin_family = AF_INET,
				      .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t length = sizeof(address);
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (listener < 0 || fd < 0 || bind(listener, (struct sockaddr *)&address, length) ||
	    listen(listener, 1) || getsockname(listener, (struct sockaddr *)&address, &length))
		bench_die("no listening socket: %s", strerror(errno));
	*child_out = fork();
	if (*child_out < 0)
		bench_die("fork: %s", strerror(errno));
	if (*child_out == 0) {
		close(fd);
		serve(listener, request_bytes, reply_bytes);
	}
	close(listener);
	if (connect(fd, (struct sockaddr *)&address, length))
		bench_die("connect: %s", strerror(errno));
	no_delay(fd);
	return fd;
}

int main(int argc, char **argv)
{
	static struct client c;
	bool with_receiver = bench_number(argc, argv, "receiver", 0);
	uint64_t ms = bench_number(argc, argv, "ms", 1000);
	uint64_t start_ns;
	double took_s;
	pid_t child;

	bench_die_with_parent();
	c.polls = bench_number(argc, argv, "poll", 0);
	c.spin_ns = bench_number(argc, argv, "spin-us", 0) * 1000;
	c.request_bytes = (uint32_t)bench_number(argc, argv, "request-bytes", 28);
	c.reply_bytes = (uint32_t)bench_number(argc, argv, "reply-bytes", 4112);
	if (!c.request_bytes || !c.reply_bytes || c.request_bytes > BYTES_MAX ||
	    c.reply_bytes > BYTES_MAX)
		bench_die("1 to %u bytes", BYTES_MAX);
	bench_samples_init(&c.done, SAMPLES_MAX);
	bench_samples_init(&c.round, SAMPLES_MAX);
	c.fd = dial(c.request_bytes, c.reply_bytes, &child);
	start_ns = iswi_now_ns();
	c.end_ns = start_ns + ms * 1000000;
	if (with_receiver)
		run_with_receiver(&c);
	else
		run_alone(&c);
	took_s = (double)(iswi_now_ns() - start_ns) / 1e9;
	close(c.fd);
	waitpid(child, NULL, 0);
	printf("{\"seconds\": %.3f, \"iops\": %.1f, ", took_s, (double)c.done.count / took_s);
	bench_samples_print(&c.done, "done_us");
	printf(", ");
	bench_samples_print(&c.round, "round_us");
	printf("}\n");
	return 0;
}
