// SPDX-License-Identifier: Apache-2.0
/* Bytes in and out of one connection. The socket blocks; its timeouts are the deadlines. */
#define _GNU_SOURCE 1
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>

#include "wire/nbd_conn.h"

int iswi_nbd_set_timeout(int fd, int option, uint64_t ns)
{
	struct timeval timeout = {
		.tv_sec = (time_t)(ns / 1000000000u),
		.tv_usec = (suseconds_t)(ns % 1000000000u / 1000u),
	};

	/* Zero would mean for ever. */
	if (ns > 0 && timeout.tv_sec == 0 && timeout.tv_usec == 0)
		timeout.tv_usec = 1;
	return setsockopt(fd, SOL_SOCKET, option, &timeout, sizeof(timeout)) == 0 ? 0 : -errno;
}

/*
 * Before GO each wait ends at the handshake's deadline. After it a client may be silent for ever
 * between requests; one that has begun a request gets send_ms_max to bring the rest, or else a
 * byte now and then would hold a slab for as long as it likes. Looked at before each wait, which
 * itself takes at most send_ms_max: the request ends after twice that at the latest.
 */
static int arm_deadline(struct iswi_nbd_conn *conn, uint64_t *request_end_ns)
{
	uint64_t now_ns;

	if (conn->handshake_end_ns == 0 && request_end_ns == NULL)
		return 0;
	now_ns = iswi_now_ns();
	if (conn->handshake_end_ns == 0) {
		if (*request_end_ns == 0)
			*request_end_ns =
				now_ns + (uint64_t)conn->server->config.send_ms_max * 1000000u;
		return now_ns < *request_end_ns ? 0 : -EPROTO;
	}
	if (now_ns >= conn->handshake_end_ns)
		return -ETIMEDOUT;
	return iswi_nbd_set_timeout(conn->fd, SO_RCVTIMEO, conn->handshake_end_ns - now_ns);
}

/*
 * One receive: returns the bytes got, at least one, or -errno. request_end_ns: of the request
 * that has begun, 0 at its first receive; NULL: none has.
 */
static ssize_t receive(struct iswi_nbd_conn *conn, struct iovec *iov, unsigned iov_count,
		       uint64_t *request_end_ns)
{
	struct msghdr message = {.msg_iov = iov, .msg_iovlen = iov_count};
	ssize_t got;
	int err;

	for (;;) {
		err = arm_deadline(conn, request_end_ns);
		if (err != 0)
			return err;
		got = recvmsg(conn->fd, &message, 0);
		if (got > 0) {
			conn->received++;
			return got;
		}
		if (got == 0)
			return -ENODATA;
		if ((errno == EAGAIN || errno == EWOULDBLOCK) && conn->handshake_end_ns != 0)
			return -ETIMEDOUT;
		if (errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK)
			return -errno;
	}
}

int iswi_nbd_rx_need(struct iswi_nbd_conn *conn, size_t bytes)
{
	uint64_t end_ns = 0;

	while (iswi_nbd_rx_available(conn) < bytes) {
		const bool begun = iswi_nbd_rx_available(conn) > 0;
		struct iovec iov;
		ssize_t got;

		if (conn->rx_head > 0) {
			memmove(conn->rx, conn->rx + conn->rx_head, iswi_nbd_rx_available(conn));
			conn->rx_tail -= conn->rx_head;
			conn->rx_head = 0;
		}
		iov.iov_base = conn->rx + conn->rx_tail;
		iov.iov_len = RX_BYTES - conn->rx_tail;
		got = receive(conn, &iov, 1, begun ? &end_ns : NULL);
		if (got < 0)
			return (int)got;
		conn->rx_tail += (size_t)got;
	}
	return 0;
}

size_t iswi_nbd_rx_take(struct iswi_nbd_conn *conn, void *data, size_t bytes)
{
	size_t taken = ISWI_MIN(bytes, iswi_nbd_rx_available(conn));

	if (data != NULL)
		memcpy(data, conn->rx + conn->rx_head, taken);
	conn->rx_head += taken;
	return taken;
}

int iswi_nbd_rx_copy(struct iswi_nbd_conn *conn, void *data, size_t bytes)
{
	char *at = data;
	size_t taken = iswi_nbd_rx_take(conn, at, bytes);
	uint64_t end_ns = 0;

	at += taken;
	bytes -= taken;
	if (bytes > 0) /* rx is empty: what comes after the payload may use all of it */
		conn->rx_head = conn->rx_tail = 0;
	while (bytes > 0) {
		struct iovec iov[2] = {
			{.iov_base = at, .iov_len = bytes},
			{.iov_base = conn->rx, .iov_len = RX_BYTES},
		};
		ssize_t got = receive(conn, iov, 2, &end_ns);

		if (got < 0)
			return (int)got;
		if ((size_t)got > bytes) {
			conn->rx_tail = (size_t)got - bytes;
			return 0;
		}
		at += got;
		bytes -= (size_t)got;
	}
	return 0;
}

int iswi_nbd_rx_skip(struct iswi_nbd_conn *conn, size_t bytes)
{
	uint64_t end_ns = 0;

	bytes -= iswi_nbd_rx_take(conn, NULL, bytes);
	while (bytes > 0) {
		struct iovec iov = {.iov_base = conn->rx, .iov_len = RX_BYTES};
		ssize_t got = receive(conn, &iov, 1, &end_ns);

		if (got < 0)
			return (int)got;
		conn->rx_head = 0;
		conn->rx_tail = (size_t)got;
		bytes -= iswi_nbd_rx_take(conn, NULL, bytes);
	}
	return 0;
}

unsigned iswi_nbd_iov_advance(struct iovec *iov, unsigned iov_count, size_t bytes)
{
	unsigned used = 0;

	while (used < iov_count && bytes >= iov[used].iov_len)
		bytes -= iov[used++].iov_len;
	if (used < iov_count) {
		iov[used].iov_base = (char *)iov[used].iov_base + bytes;
		iov[used].iov_len -= bytes;
	}
	return used;
}

ssize_t iswi_nbd_send_some(struct iswi_nbd_conn *conn, struct iovec *iov, unsigned iov_count,
			   size_t bytes_max, int flags)
{
	struct msghdr message = {.msg_iov = iov};
	size_t bytes = 0, beyond;
	ssize_t sent;

	while (message.msg_iovlen < iov_count && bytes < bytes_max)
		bytes += iov[message.msg_iovlen++].iov_len;
	beyond = bytes - ISWI_MIN(bytes, bytes_max);
	iov[message.msg_iovlen - 1].iov_len -= beyond;
	do
		sent = sendmsg(conn->fd, &message, MSG_NOSIGNAL | flags);
	while (sent < 0 && errno == EINTR);
	iov[message.msg_iovlen - 1].iov_len += beyond;
	if (sent < 0)
		return errno == EWOULDBLOCK ? -EAGAIN : -errno;
	return sent;
}

int iswi_nbd_send_all(struct iswi_nbd_conn *conn, struct iovec *iov, unsigned iov_count)
{
	while (iov_count > 0) {
		ssize_t sent = iswi_nbd_send_some(conn, iov, iov_count, SIZE_MAX, 0);
		unsigned used;

		if (sent < 0) /* -EAGAIN: SO_SNDTIMEO ran out and nothing moved in all that time */
			return sent == -EAGAIN ? -ETIMEDOUT : (int)sent;
		used = iswi_nbd_iov_advance(iov, iov_count, (size_t)sent);
		iov += used;
		iov_count -= used;
	}
	return 0;
}

void iswi_nbd_conn_shutdown(struct iswi_nbd_conn *conn)
{
	atomic_store(&conn->closing, true);
	shutdown(conn->fd, SHUT_RDWR);
}
