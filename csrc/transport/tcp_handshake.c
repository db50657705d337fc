// SPDX-License-Identifier: Apache-2.0
/*
 * Connecting and the NBD handshake (fixed newstyle, GO), with errors that tell a user what to
 * mend. The export's name is a secret: it appears in no message. Nor does text from the server.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport/tcp_internal.h"

#define NS_PER_MS 1000000ull

/* A server may send any number of INFO replies; one of ours sends two. */
#define REPLIES_MAX               64
#define REPLY_BYTES_MAX           8192
#define REQUEST_BYTES_MAX_DEFAULT (32u << 20) /* what the protocol grants when nothing is said */

struct shake {
	int fd;
	uint64_t deadline_ns;
	const struct iswi_tcp_config *config;
	struct isw_error *error;
	bool has_export;
	uint16_t export_flags;
	uint32_t block_bytes_min;
	struct iswi_tcp_export export;
};

/* -ETIMEDOUT when the time is up. */
static int wait_for(int fd, short events, uint64_t deadline_ns)
{
	for (;;) {
		uint64_t now_ns = iswi_now_ns();
		struct pollfd pfd = {.fd = fd, .events = events};
		uint64_t left_ms;
		int n;

		if (now_ns >= deadline_ns)
			return -ETIMEDOUT;
		left_ms = (deadline_ns - now_ns + NS_PER_MS - 1) / NS_PER_MS;
		n = poll(&pfd, 1, (int)ISWI_MIN(left_ms, 3600000));
		if (n > 0)
			return 0;
		if (n < 0 && errno != EINTR)
			return -errno;
	}
}

/* ---------------------------------------------------------------- connecting */

static int dial_one(const struct addrinfo *address, uint64_t deadline_ns, int *fd_out)
{
	socklen_t length = sizeof(int);
	int fd, err;

	fd = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -errno;
	iswi_page_socket_tune(fd);
	if (connect(fd, address->ai_addr, address->ai_addrlen) < 0) {
		err = -errno;
		if (err != -EINPROGRESS)
			goto err_close;
		err = wait_for(fd, POLLOUT, deadline_ns);
		if (err < 0)
			goto err_close;
		if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &length) < 0)
			err = errno;
		err = -err;
		if (err < 0)
			goto err_close;
	}
	*fd_out = fd;
	return 0;

err_close:
	close(fd);
	return err;
}

static int dial_error(const struct iswi_tcp_config *config, int err, struct isw_error *error)
{
	switch (err) {
	case -ECONNREFUSED:
		return iswi_error(error, err,
				  "%s port %u refused the connection: nothing listens there; is "
				  "the donor's daemon running, and is this its data port?",
				  config->host, config->port);
	case -ETIMEDOUT:
		return iswi_error(error, err,
				  "%s port %u did not answer within %u ms: the host is down, or a "
				  "firewall drops the packets",
				  config->host, config->port, config->connect_ms_max);
	default:
		return iswi_error(error, err, "cannot connect to %s port %u: %s", config->host,
				  config->port, strerror(-err));
	}
}

int iswi_tcp_dial(const struct iswi_tcp_config *config, uint64_t deadline_ns, int *fd_out,
		  struct isw_error *error)
{
	const struct addrinfo hints = {
		.ai_family = AF_UNSPEC,
		.ai_socktype = SOCK_STREAM,
		.ai_flags = AI_NUMERICSERV,
	};
	struct addrinfo *list, *address;
	uint32_t left = 0;
	char port[8];
	int err;

	snprintf(port, sizeof(port), "%u", config->port);
	err = getaddrinfo(config->host, port, &hints, &list);
	if (err != 0)
		return iswi_error(error, -ENXIO, "cannot resolve the host name '%s': %s",
				  config->host, gai_strerror(err));
	for (address = list; address != NULL; address = address->ai_next)
		left++;
	err = -ENXIO;
	for (address = list; address != NULL; address = address->ai_next) {
		uint64_t now_ns = iswi_now_ns();
		uint64_t share_ns = now_ns < deadline_ns ? (deadline_ns - now_ns) / left-- : 0;

		/* An address that swallows packets must leave time for the others. */
		err = dial_one(address, now_ns + share_ns, fd_out);
		if (err == 0)
			break;
	}
	freeaddrinfo(list);
	return err < 0 ? dial_error(config, err, error) : 0;
}

/* ---------------------------------------------------------------- bytes */

static int get(struct shake *shake, void *data, size_t bytes)
{
	char *at = data;

	while (bytes > 0) {
		ssize_t n = recv(shake->fd, at, bytes, 0);
		int err = 0;

		if (n == 0)
			return -ECONNRESET;
		if (n > 0) {
			at += n;
			bytes -= (size_t)n;
			continue;
		}
		if (errno == EAGAIN || errno == EWOULDBLOCK)
			err = wait_for(shake->fd, POLLIN, shake->deadline_ns);
		else if (errno != EINTR)
			err = -errno;
		if (err < 0)
			return err;
	}
	return 0;
}

static int put(struct shake *shake, const void *data, size_t bytes)
{
	const char *at = data;

	while (bytes > 0) {
		ssize_t n = send(shake->fd, at, bytes, MSG_NOSIGNAL);
		int err = 0;

		if (n >= 0) {
			at += n;
			bytes -= (size_t)n;
			continue;
		}
		if (errno == EAGAIN || errno == EWOULDBLOCK)
			err = wait_for(shake->fd, POLLOUT, shake->deadline_ns);
		else if (errno != EINTR)
			err = -errno;
		if (err < 0)
			return err;
	}
	return 0;
}

/* ---------------------------------------------------------------- the handshake */

static int not_nbd(const struct shake *shake, const char *what)
{
	return iswi_error(shake->error, -EPROTO,
			  "%s port %u does not speak the NBD protocol (%s): is this a donor's data "
			  "port, or that of another service?",
			  shake->config->host, shake->config->port, what);
}

static int broken(const struct shake *shake, int err, const char *when)
{
	const struct iswi_tcp_config *config = shake->config;

	if (err == -ETIMEDOUT)
		return iswi_error(
			shake->error, err,
			"%s port %u accepted the connection but sent nothing for %s within "
			"%u ms: is this a donor's data port, or that of another service?",
			config->host, config->port, when, config->connect_ms_max);
	if (err == -ECONNRESET || err == -EPIPE)
		return iswi_error(shake->error, -ECONNRESET,
				  "%s port %u closed the connection during %s: is this a donor's "
				  "data port, or that of another service?",
				  config->host, config->port, when);
	return iswi_error(shake->error, err, "connection to %s port %u failed during %s: %s",
			  config->host, config->port, when, strerror(-err));
}

/*
 * The magic is looked at as soon as it is there: a server of another kind may send less than a
 * whole greeting and then wait for us.
 */
static int greet(struct shake *shake)
{
	uint8_t bytes[NBD_GREETING_BYTES];
	uint8_t flags[4];
	uint16_t offered;
	int err;

	err = get(shake, bytes, 8);
	if (err < 0)
		return broken(shake, err, "the greeting");
	if (nbd_get64(bytes) != NBD_MAGIC)
		return not_nbd(shake, "its greeting is another one");
	err = get(shake, bytes + 8, sizeof(bytes) - 8);
	if (err < 0)
		return broken(shake, err, "the greeting");
	if (nbd_get64(bytes + 8) == NBD_OLDSTYLE_MAGIC)
		return not_nbd(shake, "it speaks the old style of NBD");
	if (nbd_get64(bytes + 8) != NBD_OPTION_MAGIC)
		return not_nbd(shake, "its greeting is damaged");
	offered = nbd_get16(bytes + 16);
	if ((offered & NBD_FLAG_FIXED_NEWSTYLE) == 0)
		return not_nbd(shake, "its NBD is older than fixed newstyle");
	nbd_put32(flags, offered & (NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES));
	err = put(shake, flags, sizeof(flags));
	return err < 0 ? broken(shake, err, "the greeting") : 0;
}

static int send_go(struct shake *shake)
{
	uint8_t bytes[NBD_OPTION_HEADER_BYTES + 4 + NBD_NAME_BYTES_MAX + 4];
	uint32_t name_bytes = (uint32_t)strlen(shake->config->export_name);
	uint8_t *at = bytes;
	int err;

	nbd_put_option(at, NBD_OPT_GO, 4 + name_bytes + 4);
	at += NBD_OPTION_HEADER_BYTES;
	nbd_put32(at, name_bytes);
	at += 4;
	memcpy(at, shake->config->export_name, name_bytes);
	at += name_bytes;
	nbd_put16(at, 1);
	nbd_put16(at + 2, NBD_INFO_BLOCK_SIZE);
	at += 4;
	err = put(shake, bytes, (size_t)(at - bytes));
	return err < 0 ? broken(shake, err, "the export's negotiation") : 0;
}

static int refused(const struct shake *shake, uint32_t type)
{
	const char *host = shake->config->host;
	unsigned int port = shake->config->port;

	switch (type) {
	case NBD_REP_ERR_UNKNOWN:
		return iswi_error(shake->error, -ENOENT,
				  "%s port %u does not accept the ticket: it was used, is older "
				  "than 10 s, its lease has ended or was renewed, or this is not "
				  "the donor that gave it",
				  host, port);
	case NBD_REP_ERR_TLS_REQD:
	case NBD_REP_ERR_POLICY:
		return iswi_error(shake->error, -EACCES, "%s port %u refuses the export %s", host,
				  port,
				  type == NBD_REP_ERR_POLICY ? "by its policy"
							     : "without TLS, which is not "
							       "supported here yet");
	case NBD_REP_ERR_UNSUP:
		return iswi_error(shake->error, -EOPNOTSUPP,
				  "%s port %u speaks NBD without the GO option: it is too old",
				  host, port);
	case NBD_REP_ERR_SHUTDOWN:
		return iswi_error(shake->error, -ECONNRESET, "%s port %u is shutting down", host,
				  port);
	default:
		return iswi_error(shake->error, -EPROTO,
				  "%s port %u refuses the export with NBD error 0x%x", host, port,
				  type);
	}
}

static int take_info(struct shake *shake, const uint8_t *bytes, uint32_t length)
{
	if (length < 2)
		return not_nbd(shake, "an information reply without a type");
	switch (nbd_get16(bytes)) {
	case NBD_INFO_EXPORT:
		if (length != NBD_INFO_EXPORT_BYTES)
			return not_nbd(shake, "an export reply of a wrong length");
		shake->has_export = true;
		shake->export.bytes = nbd_get64(bytes + 2);
		shake->export_flags = nbd_get16(bytes + 10);
		return 0;
	case NBD_INFO_BLOCK_SIZE:
		if (length != NBD_INFO_BLOCK_SIZE_BYTES)
			return not_nbd(shake, "a block size reply of a wrong length");
		shake->block_bytes_min = nbd_get32(bytes + 2);
		shake->export.request_bytes_max = nbd_get32(bytes + 10);
		return 0;
	default:
		return 0; /* what was not asked for does not matter */
	}
}

/* 1: more to come. 0: acknowledged. */
static int take_reply(struct shake *shake)
{
	uint8_t header[NBD_OPTION_REPLY_BYTES];
	uint8_t bytes[REPLY_BYTES_MAX];
	uint32_t type, length;
	int err;

	err = get(shake, header, sizeof(header));
	if (err < 0)
		return broken(shake, err, "the export's negotiation");
	if (nbd_get64(header) != NBD_OPTION_REPLY_MAGIC || nbd_get32(header + 8) != NBD_OPT_GO)
		return not_nbd(shake, "a reply to another option");
	type = nbd_get32(header + 12);
	length = nbd_get32(header + 16);
	if (length > sizeof(bytes))
		return not_nbd(shake, "an option reply far too long");
	/* Before the text is read: the server may close without sending all of it. */
	if ((type & NBD_REP_FLAG_ERROR) != 0)
		return refused(shake, type);
	err = get(shake, bytes, length);
	if (err < 0)
		return broken(shake, err, "the export's negotiation");
	if (type == NBD_REP_ACK)
		return 0;
	if (type != NBD_REP_INFO)
		return not_nbd(shake, "an option reply of unknown type");
	err = take_info(shake, bytes, length);
	return err < 0 ? err : 1;
}

static int check_export(const struct shake *shake)
{
	const struct iswi_tcp_config *config = shake->config;

	if (!shake->has_export)
		return not_nbd(shake, "an export without a size");
	if (shake->export.bytes < config->export_bytes_min)
		return iswi_error(
			shake->error, -ERANGE,
			"the export of %s port %u has %llu bytes, %llu are needed: do both "
			"ends use the same slab size?",
			config->host, config->port, (unsigned long long)shake->export.bytes,
			(unsigned long long)config->export_bytes_min);
	if ((shake->export_flags & NBD_FLAG_READ_ONLY) != 0)
		return iswi_error(shake->error, -EROFS, "the export of %s port %u is read-only",
				  config->host, config->port);
	if (shake->block_bytes_min > ISW_PAGE_BYTES)
		return iswi_error(
			shake->error, -EOPNOTSUPP,
			"%s port %u cannot transfer single pages of %u bytes: its smallest "
			"block has %u",
			config->host, config->port, ISW_PAGE_BYTES, shake->block_bytes_min);
	if (shake->export.request_bytes_max < config->transfer_bytes_max)
		return iswi_error(
			shake->error, -EOPNOTSUPP,
			"%s port %u takes requests of %u bytes at most, a donor must take "
			"%u: raise that NBD server's maximum block size",
			config->host, config->port, shake->export.request_bytes_max,
			config->transfer_bytes_max);
	return 0;
}

int iswi_tcp_handshake(int fd, const struct iswi_tcp_config *config, uint64_t deadline_ns,
		       struct iswi_tcp_export *export_out, struct isw_error *error)
{
	struct shake shake = {
		.fd = fd,
		.deadline_ns = deadline_ns,
		.config = config,
		.error = error,
		.block_bytes_min = 1,
		.export.request_bytes_max = REQUEST_BYTES_MAX_DEFAULT,
	};
	int err;

	err = greet(&shake);
	if (err == 0)
		err = send_go(&shake);
	if (err < 0)
		return err;
	for (int replies = 0;; replies++) {
		if (replies == REPLIES_MAX)
			return not_nbd(&shake, "no end of option replies");
		err = take_reply(&shake);
		if (err < 0)
			return err;
		if (err == 0)
			break;
	}
	err = check_export(&shake);
	if (err == 0)
		*export_out = shake.export;
	return err;
}
