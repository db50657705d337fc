// SPDX-License-Identifier: Apache-2.0
/*
 * The fixed newstyle handshake: greeting, the client's flags, then options until one of them
 * opens an export. Everything the client can say here is bounded: number and length of options,
 * length of a name, and the time until GO.
 */
#include <string.h>

#include "wire/nbd_conn.h"

/* An option's payload, in rx until the next receive. */
struct option {
	uint32_t number;
	uint32_t length;
	const unsigned char *data;
};

static int send_bytes(struct iswi_nbd_conn *conn, void *data, size_t bytes)
{
	struct iovec iov = {.iov_base = data, .iov_len = bytes};

	return iswi_nbd_send_all(conn, &iov, 1);
}

static int send_reply(struct iswi_nbd_conn *conn, uint32_t option, uint32_t type, void *data,
		      uint32_t bytes)
{
	unsigned char head[NBD_OPTION_REPLY_BYTES];
	struct iovec iov[2] = {
		{.iov_base = head, .iov_len = sizeof(head)},
		{.iov_base = data, .iov_len = bytes},
	};

	nbd_put_option_reply(head, option, type, bytes);
	return iswi_nbd_send_all(conn, iov, 2);
}

static int greet(struct iswi_nbd_conn *conn)
{
	const uint32_t known = NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES;
	unsigned char greeting[NBD_GREETING_BYTES];
	uint32_t flags;
	int err;

	nbd_put64(greeting, NBD_MAGIC);
	nbd_put64(greeting + 8, NBD_OPTION_MAGIC);
	nbd_put16(greeting + 16, NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES);
	err = send_bytes(conn, greeting, sizeof(greeting));
	if (err != 0)
		return err;
	err = iswi_nbd_rx_copy(conn, &flags, sizeof(flags));
	if (err != 0)
		return err;
	flags = nbd_get32(&flags);
	if ((flags & ~known) != 0)
		return -EPROTO;
	conn->no_zeroes = (flags & NBD_FLAG_NO_ZEROES) != 0;
	return 0;
}

static int open_export(struct iswi_nbd_conn *conn, const unsigned char *name, uint32_t name_bytes,
		       struct iswi_nbd_conn *bind, struct iswi_nbd_export *export)
{
	struct iswi_nbd_server *server = conn->server;
	int err;

	memset(export, 0, sizeof(*export));
	err = server->config.backend->open(server->config.ctx, (const char *)name, name_bytes, bind,
					   export);
	if (err != 0)
		iswi_count(&server->connections_refused, 1);
	/* Before the answer: whoever has that may count on the place. */
	if (err == 0 && bind != NULL && !iswi_nbd_prove(bind)) {
		server->config.backend->close(server->config.ctx, export, bind);
		err = -ECONNABORTED;
	}
	return err;
}

static void close_export(struct iswi_nbd_conn *conn)
{
	conn->server->config.backend->close(conn->server->config.ctx, &conn->export, conn);
}

static uint16_t export_flags(void)
{
	/* Nothing is cached per connection, so a flush on any of them covers all. */
	return NBD_FLAG_HAS_FLAGS | NBD_FLAG_SEND_FLUSH | NBD_FLAG_SEND_FUA | NBD_FLAG_SEND_TRIM |
	       NBD_FLAG_SEND_WRITE_ZEROES | NBD_FLAG_CAN_MULTI_CONN;
}

/* The old way in: it knows no error answer, only a closed connection. Returns 1: serve now. */
static int export_name(struct iswi_nbd_conn *conn, const struct option *option)
{
	unsigned char reply[10 + 124] = {0};
	int err;

	if (option->length > NBD_NAME_BYTES_MAX)
		return -EPROTO;
	err = open_export(conn, option->data, option->length, conn, &conn->export);
	if (err != 0)
		return -ECONNABORTED;
	nbd_put64(reply, conn->export.size_bytes);
	nbd_put16(reply + 8, export_flags());
	err = send_bytes(conn, reply, conn->no_zeroes ? 10 : sizeof(reply));
	if (err != 0) {
		close_export(conn);
		return err;
	}
	return 1;
}

static int list(struct iswi_nbd_conn *conn, const struct option *option)
{
	const char *listed = conn->server->config.backend->listed;
	unsigned char entry[4 + 64];
	uint32_t name_bytes;
	int err;

	if (option->length != 0)
		return send_reply(conn, option->number, NBD_REP_ERR_INVALID, NULL, 0);
	if (listed != NULL) {
		name_bytes = (uint32_t)strnlen(listed, sizeof(entry) - 4);
		nbd_put32(entry, name_bytes);
		memcpy(entry + 4, listed, name_bytes);
		err = send_reply(conn, option->number, NBD_REP_SERVER, entry, 4 + name_bytes);
		if (err != 0)
			return err;
	}
	return send_reply(conn, option->number, NBD_REP_ACK, NULL, 0);
}

/* Payload of INFO and GO: u32 name length, name, u16 count, that many u16. */
static int parse_info(const struct option *option, const unsigned char **name_out,
		      uint32_t *name_bytes_out)
{
	uint32_t name_bytes, infos;

	if (option->length < 6)
		return -EINVAL;
	name_bytes = nbd_get32(option->data);
	if (name_bytes > NBD_NAME_BYTES_MAX || name_bytes > option->length - 6)
		return -EINVAL;
	infos = nbd_get16(option->data + 4 + name_bytes);
	if (option->length != 6 + name_bytes + 2 * infos)
		return -EINVAL;
	*name_out = option->data + 4;
	*name_bytes_out = name_bytes;
	return 0;
}

static uint32_t refusal(int error)
{
	switch (error) {
	case -ENOENT:
		return NBD_REP_ERR_UNKNOWN;
	case -ESHUTDOWN:
		return NBD_REP_ERR_SHUTDOWN;
	default:
		return NBD_REP_ERR_POLICY;
	}
}

/*
 * The block sizes are told whether or not they were asked for. The protocol allows to turn away
 * who does not ask (NBD_REP_ERR_BLOCK_SIZE_REQD), but nbd-client never asks: it gets its block size
 * from its command line, and could not be used at all. Requests that do not fit get NBD_EINVAL.
 */
static int send_infos(struct iswi_nbd_conn *conn, uint32_t option,
		      const struct iswi_nbd_export *export)
{
	unsigned char reply[NBD_INFO_BLOCK_SIZE_BYTES];
	int err;

	nbd_put16(reply, NBD_INFO_EXPORT);
	nbd_put64(reply + 2, export->size_bytes);
	nbd_put16(reply + 10, export_flags());
	err = send_reply(conn, option, NBD_REP_INFO, reply, NBD_INFO_EXPORT_BYTES);
	if (err != 0)
		return err;
	nbd_put16(reply, NBD_INFO_BLOCK_SIZE);
	nbd_put32(reply + 2, export->block_bytes_min);
	nbd_put32(reply + 6, export->block_bytes_preferred);
	nbd_put32(reply + 10, export->block_bytes_max);
	err = send_reply(conn, option, NBD_REP_INFO, reply, NBD_INFO_BLOCK_SIZE_BYTES);
	if (err != 0)
		return err;
	return send_reply(conn, option, NBD_REP_ACK, NULL, 0);
}

/* Returns 1 when GO opened the export. */
static int info_or_go(struct iswi_nbd_conn *conn, const struct option *option)
{
	const bool go = option->number == NBD_OPT_GO;
	const unsigned char *name;
	struct iswi_nbd_export described, *export = go ? &conn->export : &described;
	uint32_t name_bytes;
	int err;

	if (parse_info(option, &name, &name_bytes) != 0)
		return send_reply(conn, option->number, NBD_REP_ERR_INVALID, NULL, 0);
	err = open_export(conn, name, name_bytes, go ? conn : NULL, export);
	if (err != 0)
		return send_reply(conn, option->number, refusal(err), NULL, 0);
	err = send_infos(conn, option->number, export);
	if (!go)
		return err;
	if (err != 0) {
		close_export(conn);
		return err;
	}
	return 1;
}

/* Returns 1 when requests follow, 0 when more options do. */
static int answer_option(struct iswi_nbd_conn *conn, const struct option *option)
{
	switch (option->number) {
	case NBD_OPT_EXPORT_NAME:
		return export_name(conn, option);
	case NBD_OPT_ABORT:
		/* The client may have closed already: what becomes of the answer is the same. */
		send_reply(conn, option->number, NBD_REP_ACK, NULL, 0);
		return -ECONNABORTED;
	case NBD_OPT_LIST:
		return list(conn, option);
	case NBD_OPT_INFO:
	case NBD_OPT_GO:
		return info_or_go(conn, option);
	case NBD_OPT_STARTTLS:
	case NBD_OPT_STRUCTURED_REPLY:
	case NBD_OPT_EXTENDED_HEADERS: /* known, so also known to have no payload */
		return send_reply(conn, option->number,
				  option->length != 0 ? NBD_REP_ERR_INVALID : NBD_REP_ERR_UNSUP,
				  NULL, 0);
	default:
		return send_reply(conn, option->number, NBD_REP_ERR_UNSUP, NULL, 0);
	}
}

static int next_option(struct iswi_nbd_conn *conn)
{
	unsigned char head[NBD_OPTION_HEADER_BYTES];
	struct option option;
	int err;

	err = iswi_nbd_rx_copy(conn, head, sizeof(head));
	if (err != 0)
		return err;
	if (nbd_get64(head) != NBD_OPTION_MAGIC)
		return -EPROTO;
	option.number = nbd_get32(head + 8);
	option.length = nbd_get32(head + 12);
	if (option.length > ISWI_NBD_OPTION_BYTES_MAX)
		return -EPROTO;
	err = iswi_nbd_rx_need(conn, option.length);
	if (err != 0)
		return err;
	option.data = conn->rx + conn->rx_head;
	conn->rx_head += option.length;
	return answer_option(conn, &option);
}

int iswi_nbd_handshake(struct iswi_nbd_conn *conn)
{
	int done = greet(conn);

	for (unsigned options = 0; done == 0; options++) {
		if (options == ISWI_NBD_OPTIONS_MAX)
			return -EPROTO;
		done = next_option(conn);
	}
	return done < 0 ? done : 0;
}
