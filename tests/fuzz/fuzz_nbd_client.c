// SPDX-License-Identifier: Apache-2.0
/*
 * libFuzzer over the NBD client's handshake: whatever answers on a donor's port, it ends, with an
 * export that can carry pages or with an error and a sentence. No socket: the calls on one are
 * answered here (linked with --wrap). What follows the handshake: fuzz_nbd_reply.c.
 *
 * Input: a byte (how the bytes are cut, how they end), then what the other end says.
 * Built and run by tests/fuzz/fuzzers.py.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "transport/tcp_internal.h"

#define FD             1000000 /* never opened */
#define TICKET         "0123456789abcdef0123456789abcdef"
#define BYTES_MIN      (4 * ISW_PAGE_BYTES)
#define TRANSFER_BYTES (2 * ISW_PAGE_BYTES)

static struct {
	const uint8_t *at;
	size_t left;
	unsigned how;
	unsigned calls;
} stream;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
ssize_t __wrap_recv(int fd, void *data, size_t bytes, int flags);
ssize_t __wrap_send(int fd, const void *data, size_t bytes, int flags);
int __wrap_poll(struct pollfd *pollfds, nfds_t count, int timeout_ms);

ssize_t __wrap_recv(int fd, void *data, size_t bytes, int flags)
{
	size_t piece = ISWI_MIN(bytes, stream.left);

	(void)flags;
	if (fd != FD || bytes == 0)
		abort();
	if ((stream.how & 1) != 0 && stream.calls++ % 3 == 0) {
		errno = (stream.how & 2) != 0 ? EAGAIN : EINTR;
		return -1;
	}
	if (piece == 0 && (stream.how & 4) != 0) {
		errno = ECONNRESET;
		return -1;
	}
	if ((stream.how & 8) != 0)
		piece = ISWI_MIN(piece, 3u);
	memcpy(data, stream.at, piece);
	stream.at += piece;
	stream.left -= piece;
	return (ssize_t)piece;
}

ssize_t __wrap_send(int fd, const void *data, size_t bytes, int flags)
{
	static uint8_t sink[8192];
	size_t piece = (stream.how & 16) != 0 ? 1 + bytes / 2 : bytes;

	(void)flags;
	if (fd != FD || bytes == 0 || bytes > sizeof(sink))
		abort();
	memcpy(sink, data, bytes); /* all of it must be readable */
	if ((stream.how & 32) != 0 && stream.left < 16) {
		errno = EPIPE;
		return -1;
	}
	return (ssize_t)ISWI_MIN(piece, bytes);
}

int __wrap_poll(struct pollfd *pollfds, nfds_t count, int timeout_ms)
{
	(void)count, (void)timeout_ms;
	pollfds[0].revents = pollfds[0].events;
	return 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const struct iswi_tcp_config config = {
		.host = "donor",
		.port = 9401,
		.export_name = TICKET,
		.connect_ms_max = 60000,
		.export_bytes_min = BYTES_MIN,
		.transfer_bytes_max = TRANSFER_BYTES,
	};
	struct iswi_tcp_export export = {0};
	struct isw_error error = {0};
	int err;

	if (size < 1)
		return -1;
	stream.at = data + 1;
	stream.left = size - 1;
	stream.how = data[0];
	stream.calls = 0;
	err = iswi_tcp_handshake(FD, &config, iswi_now_ns() + 60000000000u, &export, &error);
	if (err > 0)
		abort();
	if (err == 0 && (export.bytes < BYTES_MIN || export.request_bytes_max < TRANSFER_BYTES))
		abort();
	/* A sentence for the user, in which the secret name must not appear. */
	if (err < 0 && (error.code != err || strnlen(error.text, sizeof(error.text)) < 10 ||
			memchr(error.text, '\0', sizeof(error.text)) == NULL ||
			strstr(error.text, TICKET) != NULL))
		abort();
	return 0;
}
