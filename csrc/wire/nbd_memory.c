// SPDX-License-Identifier: Apache-2.0
/*
 * Serving an export whose bytes lie in memory: READ is answered straight from there, WRITE lands
 * straight in there. A READ holds its memory until the last byte of its answer has left, a WRITE
 * until its payload has landed. Answers are collected while complete requests are at hand and
 * sent before anything is waited for, so no lone request waits for company and no silent client
 * keeps the memory of another request's answer.
 */
#include <string.h>

#include "wire/nbd_conn.h"

/* Answers of this size together are sent without waiting for the batch to fill. */
#define BATCH_BYTES (1u << 20)

static void batch_release(struct iswi_nbd_conn *conn)
{
	const struct iswi_nbd_backend *backend = conn->server->config.backend;
	struct iswi_nbd_batch *batch = &conn->batch;

	for (unsigned i = 0; i < batch->hold_count; i++)
		backend->release(&conn->export, &batch->holds[i]);
	batch->count = batch->iov_count = batch->hold_count = 0;
	batch->reads = batch->read_bytes = 0;
}

static void count_reads(struct iswi_nbd_counters *counters, const struct iswi_nbd_batch *batch)
{
	iswi_count(&counters->read_requests, batch->reads);
	iswi_count(&counters->read_bytes, batch->read_bytes);
}

static int batch_send(struct iswi_nbd_conn *conn)
{
	struct iswi_nbd_batch *batch = &conn->batch;
	int err;

	if (batch->count == 0)
		return 0;
	err = iswi_nbd_send_all(conn, batch->iov, batch->iov_count);
	if (err == 0 && batch->reads > 0) {
		count_reads(&conn->server->counters, batch);
		if (conn->export.counters != NULL)
			count_reads(conn->export.counters, batch);
	}
	batch_release(conn);
	return err;
}

/* hold: of a successful READ, taken; else NULL. */
static int batch_add(struct iswi_nbd_conn *conn, const struct nbd_request *request, int error,
		     const struct iswi_nbd_hold *hold)
{
	struct iswi_nbd_batch *batch = &conn->batch;
	unsigned char *head = batch->heads[batch->count++];
	struct nbd_simple_reply reply = {
		.error = nbd_error_from_errno(error),
		.cookie = request->cookie,
	};

	nbd_put_simple_reply(head, &reply);
	batch->iov[batch->iov_count++] =
		(struct iovec){.iov_base = head, .iov_len = NBD_SIMPLE_REPLY_BYTES};
	if (error != 0)
		iswi_count(&conn->server->request_errors, 1);
	if (hold != NULL) {
		batch->iov[batch->iov_count++] =
			(struct iovec){.iov_base = hold->memory, .iov_len = request->length};
		batch->holds[batch->hold_count++] = *hold;
		batch->reads++;
		batch->read_bytes += request->length;
	}
	if (batch->count == BATCH_REPLIES || batch->read_bytes >= BATCH_BYTES)
		return batch_send(conn);
	return 0;
}

/* Before a receive that may wait. */
static int send_before_wait(struct iswi_nbd_conn *conn, size_t wanted)
{
	return iswi_nbd_rx_available(conn) < wanted ? batch_send(conn) : 0;
}

static void count_write(struct iswi_nbd_counters *counters, uint32_t bytes)
{
	iswi_count(&counters->write_requests, 1);
	iswi_count(&counters->write_bytes, bytes);
}

/* The payload has to be taken off the wire in any case. Returns what ends the connection. */
static int serve_write(struct iswi_nbd_conn *conn, const struct nbd_request *request, int error)
{
	const struct iswi_nbd_backend *backend = conn->server->config.backend;
	struct iswi_nbd_hold hold;
	int err;

	err = send_before_wait(conn, request->length);
	if (err != 0)
		return err;
	if (error == 0)
		error = backend->hold(&conn->export, request->offset, request->length, &hold);
	if (error != 0) {
		err = iswi_nbd_rx_skip(conn, request->length);
	} else {
		err = iswi_nbd_rx_copy(conn, hold.memory, request->length);
		backend->release(&conn->export, &hold);
	}
	if (err != 0)
		return err;
	if (error == 0) {
		count_write(&conn->server->counters, request->length);
		if (conn->export.counters != NULL)
			count_write(conn->export.counters, request->length);
	}
	return batch_add(conn, request, error, NULL);
}

static int serve_read(struct iswi_nbd_conn *conn, const struct nbd_request *request, int error)
{
	const struct iswi_nbd_backend *backend = conn->server->config.backend;
	struct iswi_nbd_hold hold;

	if (error == 0)
		error = backend->hold(&conn->export, request->offset, request->length, &hold);
	return batch_add(conn, request, error, error == 0 ? &hold : NULL);
}

/* TRIM too: a hole could not be punched into memory that is pinned or registered. */
static int serve_zeroes(struct iswi_nbd_conn *conn, const struct nbd_request *request, int error)
{
	const struct iswi_nbd_backend *backend = conn->server->config.backend;
	struct iswi_nbd_hold hold;
	int err;

	if (request->length > BATCH_BYTES) { /* takes a while: others need not wait for it */
		err = batch_send(conn);
		if (err != 0)
			return err;
	}
	if (error == 0)
		error = backend->hold(&conn->export, request->offset, request->length, &hold);
	if (error == 0) {
		memset(hold.memory, 0, request->length);
		backend->release(&conn->export, &hold);
	}
	return batch_add(conn, request, error, NULL);
}

static int serve_one(struct iswi_nbd_conn *conn, const struct nbd_request *request)
{
	int error = iswi_nbd_check(&conn->export, request);

	switch (request->command) {
	case NBD_CMD_READ:
		return serve_read(conn, request, error);
	case NBD_CMD_WRITE:
		return serve_write(conn, request, error);
	case NBD_CMD_TRIM:
	case NBD_CMD_WRITE_ZEROES:
		return serve_zeroes(conn, request, error);
	default: /* FLUSH: memory is as safe as it gets. Unknown ones have their error. */
		return batch_add(conn, request, error, NULL);
	}
}

int iswi_nbd_memory_serve(struct iswi_nbd_conn *conn)
{
	struct nbd_request request;
	int err;

	memset(&conn->batch, 0, sizeof(conn->batch));
	do {
		err = send_before_wait(conn, NBD_REQUEST_BYTES);
		if (err == 0)
			err = iswi_nbd_rx_need(conn, NBD_REQUEST_BYTES);
		if (err == 0)
			err = iswi_nbd_next(conn, &request);
		if (err == 0)
			err = serve_one(conn, &request);
	} while (err == 0);
	if (err == -ENODATA)
		batch_send(conn); /* DISC: what was asked before it is still answered */
	batch_release(conn);
	return err;
}
