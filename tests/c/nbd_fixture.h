/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A bare NBD client for tests of the server: it says exactly what it is told, right or wrong.
 * Every wait is bounded: a server that says nothing for WAIT_S fails the test.
 */
#ifndef ISW_TEST_NBD_FIXTURE_H
#define ISW_TEST_NBD_FIXTURE_H

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "wire/nbd.h"

#ifndef WAIT_S
#define WAIT_S 60 /* a bound for what ends at once unless something is broken */
#endif

/* The other end closed the connection, or reset it. */
#define CLOSED UINT32_MAX

static inline void sleep_ms(unsigned ms)
{
	struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};

	nanosleep(&time, NULL);
}

static inline void check_says(const char *text, const char *words)
{
	if (strstr(text, words) == NULL) {
		fprintf(stderr, "no '%s' in: %s\n", words, text);
		exit(1);
	}
}

/* Runs it in so many threads, each with its number. */
static inline void at_once(uintptr_t count, void *(*run)(void *number))
{
	pthread_t threads[16];

	CHECK(count <= 16);
	for (uintptr_t i = 0; i < count; i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, run, (void *)i), 0);
	while (count > 0)
		CHECK_EQ(pthread_join(threads[--count], NULL), 0);
}

/* Waits until the condition is true; fails the test when it does not become so. */
#define WAIT_FOR(condition)                                                                        \
	do {                                                                                       \
		for (unsigned waits_ = 0; !(condition); waits_++) {                                \
			CHECK(waits_ < WAIT_S * 200u);                                             \
			sleep_ms(5);                                                               \
		}                                                                                  \
	} while (0)

static inline void bound_waits(int fd)
{
	struct timeval timeout = {.tv_sec = WAIT_S};

	CHECK_EQ(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout)), 0);
	CHECK_EQ(setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)), 0);
}

/* receive_bytes: of the socket's buffer; 0 leaves the default. */
static inline int dial_buffered(uint16_t port, int receive_bytes)
{
	struct sockaddr_in address = {
		.sin_family = AF_INET,
		.sin_port = htons(port),
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};
	const int on = 1;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(fd >= 0);
	bound_waits(fd);
	/* Headers and payloads are said one by one; none may wait for the last one's ACK. */
	CHECK_EQ(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)), 0);
	if (receive_bytes > 0)
		CHECK_EQ(setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &receive_bytes,
				    sizeof(receive_bytes)),
			 0);
	CHECK_EQ(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
	return fd;
}

static inline int dial(uint16_t port)
{
	return dial_buffered(port, 0);
}

static inline int dial_unix(const char *path)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(fd >= 0);
	bound_waits(fd);
	CHECK(strlen(path) < sizeof(address.sun_path));
	strcpy(address.sun_path, path);
	CHECK_EQ(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
	return fd;
}

/* Makes both ends; the first is the client's. */
static inline void make_ends(int type, int ends[2])
{
	CHECK_EQ(socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, ends), 0);
	bound_waits(ends[0]);
}

/* false: the other end is gone. */
static inline bool say(int fd, const void *data, size_t bytes)
{
	const char *at = data;

	while (bytes > 0) {
		ssize_t sent = send(fd, at, bytes, MSG_NOSIGNAL);

		if (sent < 0) {
			CHECK(errno == EPIPE || errno == ECONNRESET);
			return false;
		}
		at += sent;
		bytes -= (size_t)sent;
	}
	return true;
}

/* false: the other end closed before all of it came. */
static inline bool hear(int fd, void *data, size_t bytes)
{
	char *at = data;

	while (bytes > 0) {
		ssize_t got = recv(fd, at, bytes, 0);

		if (got == 0)
			return false;
		if (got < 0) {
			CHECK(errno == ECONNRESET || errno == EPIPE);
			return false;
		}
		at += got;
		bytes -= (size_t)got;
	}
	return true;
}

/* Whatever comes until the end is thrown away, so that none of it causes a reset. */
static inline void hear_close(int fd)
{
	char bytes[4096];

	errno = 0; /* which the end of a stream leaves as it was */
	while (recv(fd, bytes, sizeof(bytes), 0) > 0)
		;
	CHECK(errno != EAGAIN);
}

/* The other end must end the connection. */
static inline void await_close(int fd)
{
	hear_close(fd);
	close(fd);
}

static inline void greet(int fd, uint32_t flags)
{
	unsigned char greeting[NBD_GREETING_BYTES];
	uint32_t wire;

	CHECK(hear(fd, greeting, sizeof(greeting)));
	CHECK(nbd_get64(greeting) == NBD_MAGIC);
	CHECK(nbd_get64(greeting + 8) == NBD_OPTION_MAGIC);
	CHECK_EQ(nbd_get16(greeting + 16), NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES);
	nbd_put32(&wire, flags);
	CHECK(say(fd, &wire, sizeof(wire)));
}

static inline bool say_option(int fd, uint32_t option, const void *data, uint32_t bytes)
{
	unsigned char head[NBD_OPTION_HEADER_BYTES];

	nbd_put_option(head, option, bytes);
	return say(fd, head, sizeof(head)) && say(fd, data, bytes);
}

/* One option reply: its type, payload into data (at most bytes_max), or CLOSED. */
static inline uint32_t hear_option(int fd, uint32_t option, void *data, uint32_t bytes_max,
				   uint32_t *bytes_out)
{
	unsigned char head[NBD_OPTION_REPLY_BYTES];
	uint32_t bytes;

	if (!hear(fd, head, sizeof(head)))
		return CLOSED;
	CHECK(nbd_get64(head) == NBD_OPTION_REPLY_MAGIC);
	CHECK_EQ(nbd_get32(head + 8), option);
	bytes = nbd_get32(head + 16);
	CHECK(bytes <= bytes_max);
	CHECK(hear(fd, data, bytes));
	if (bytes_out != NULL)
		*bytes_out = bytes;
	return nbd_get32(head + 12);
}

struct described {
	uint64_t size;
	uint16_t flags;
	uint32_t block_min, block_preferred, block_max;
};

/* INFO or GO: the last reply's type, or CLOSED. */
static inline uint32_t ask_export(int fd, uint32_t option, const char *name,
				  struct described *described)
{
	unsigned char data[256];
	uint32_t name_bytes = (uint32_t)strlen(name), type, bytes;

	nbd_put32(data, name_bytes);
	memcpy(data + 4, name, name_bytes);
	nbd_put16(data + 4 + name_bytes, 1);
	nbd_put16(data + 6 + name_bytes, NBD_INFO_BLOCK_SIZE);
	if (!say_option(fd, option, data, 8 + name_bytes))
		return CLOSED;
	while ((type = hear_option(fd, option, data, sizeof(data), &bytes)) == NBD_REP_INFO) {
		if (described == NULL)
			continue;
		if (nbd_get16(data) == NBD_INFO_EXPORT) {
			CHECK_EQ(bytes, NBD_INFO_EXPORT_BYTES);
			described->size = nbd_get64(data + 2);
			described->flags = nbd_get16(data + 10);
		} else if (nbd_get16(data) == NBD_INFO_BLOCK_SIZE) {
			CHECK_EQ(bytes, NBD_INFO_BLOCK_SIZE_BYTES);
			described->block_min = nbd_get32(data + 2);
			described->block_preferred = nbd_get32(data + 6);
			described->block_max = nbd_get32(data + 10);
		}
	}
	return type;
}

/* Greets and opens; returns 0, an NBD_REP_ERR_* or CLOSED. */
static inline uint32_t try_open(int fd, const char *name)
{
	uint32_t type;

	greet(fd, NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES);
	type = ask_export(fd, NBD_OPT_GO, name, NULL);
	return type == NBD_REP_ACK ? 0 : type;
}

static inline int open_export(uint16_t port, const char *name)
{
	int fd = dial(port);

	CHECK_EQ(try_open(fd, name), 0);
	return fd;
}

/* The header alone. */
static inline bool say_request(int fd, uint16_t command, uint16_t flags, uint64_t cookie,
			       uint64_t offset, uint32_t length)
{
	struct nbd_request request = {
		.flags = flags,
		.command = command,
		.cookie = cookie,
		.offset = offset,
		.length = length,
	};
	unsigned char wire[NBD_REQUEST_BYTES];

	nbd_put_request(wire, &request);
	return say(fd, wire, sizeof(wire));
}

/* An NBD error (0: success, then `bytes` were read into data) or CLOSED. */
static inline uint32_t hear_reply(int fd, uint64_t cookie, void *data, uint32_t bytes)
{
	unsigned char wire[NBD_SIMPLE_REPLY_BYTES];
	struct nbd_simple_reply reply;

	if (!hear(fd, wire, sizeof(wire)))
		return CLOSED;
	CHECK_EQ(nbd_get_simple_reply(wire, &reply), 0);
	CHECK_EQ(reply.cookie, cookie);
	if (reply.error == 0 && !hear(fd, data, bytes))
		return CLOSED;
	return reply.error;
}

static inline uint32_t do_read(int fd, uint64_t offset, void *data, uint32_t bytes)
{
	if (!say_request(fd, NBD_CMD_READ, 0, 0x1122334455667788, offset, bytes))
		return CLOSED;
	return hear_reply(fd, 0x1122334455667788, data, bytes);
}

static inline uint32_t do_write(int fd, uint64_t offset, const void *data, uint32_t bytes)
{
	if (!say_request(fd, NBD_CMD_WRITE, 0, offset + 1, offset, bytes) || !say(fd, data, bytes))
		return CLOSED;
	return hear_reply(fd, offset + 1, NULL, 0);
}

static inline uint32_t do_command(int fd, uint16_t command, uint16_t flags, uint64_t offset,
				  uint32_t length)
{
	if (!say_request(fd, command, flags, 42, offset, length))
		return CLOSED;
	return hear_reply(fd, 42, NULL, 0);
}

static inline bool all_bytes(const void *data, unsigned char value, size_t bytes)
{
	const unsigned char *at = data;

	for (size_t i = 0; i < bytes; i++)
		if (at[i] != value)
			return false;
	return true;
}

static inline void fill_bytes(int fd, uint64_t offset, int value, uint32_t bytes)
{
	char *data = malloc(bytes);

	CHECK(data != NULL);
	memset(data, value, bytes);
	CHECK_EQ(do_write(fd, offset, data, bytes), 0);
	free(data);
}

static inline void check_bytes(int fd, uint64_t offset, int value, uint32_t bytes)
{
	char *data = malloc(bytes);

	CHECK(data != NULL);
	CHECK_EQ(do_read(fd, offset, data, bytes), 0);
	CHECK(all_bytes(data, (unsigned char)value, bytes));
	free(data);
}

#endif
