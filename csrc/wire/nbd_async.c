// SPDX-License-Identifier: Apache-2.0
/*
 * Serving an export whose requests end later, on a thread of the backend's. The connection's
 * thread takes requests off the wire and submits them; answers go out as described at struct
 * iswi_nbd_tx. The connection ends when its last request was given back.
 */
#define _GNU_SOURCE 1
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include "wire/nbd_conn.h"

/* ---- answers */

static void give(struct iswi_nbd_conn *conn, struct iswi_nbd_request *request)
{
	conn->server->config.backend->give(&conn->export, request);
}

static bool answer_has_data(const struct iswi_nbd_request *request)
{
	return request->command == NBD_CMD_READ && request->error == 0;
}

/* tx->lock held, tx->sending is ours. Fills the batch from what was completed. */
static void batch_fill(struct iswi_nbd_tx *tx)
{
	struct iswi_nbd_request **end = &tx->batch;
	unsigned count = 0;

	tx->iov_count = tx->iov_sent = 0;
	tx->batch = tx->first;
	while (*end != NULL && count < BATCH_REPLIES) {
		struct iswi_nbd_request *request = *end;
		struct nbd_simple_reply reply = {
			.error = nbd_error_from_errno(request->error),
			.cookie = request->cookie,
		};

		nbd_put_simple_reply(tx->heads[count], &reply);
		tx->iov[tx->iov_count++] = (struct iovec){.iov_base = tx->heads[count],
							  .iov_len = NBD_SIMPLE_REPLY_BYTES};
		if (answer_has_data(request))
			tx->iov[tx->iov_count++] = (struct iovec){.iov_base = request->data,
								  .iov_len = request->length};
		count++;
		end = &request->next;
	}
	tx->first = *end;
	if (tx->first == NULL)
		tx->last = &tx->first;
	*end = NULL;
}

static void count_answer(struct iswi_nbd_counters *counters, const struct iswi_nbd_request *request)
{
	if (request->command == NBD_CMD_READ) {
		iswi_count(&counters->read_requests, 1);
		iswi_count(&counters->read_bytes, request->length);
	} else if (request->command == NBD_CMD_WRITE) {
		iswi_count(&counters->write_requests, 1);
		iswi_count(&counters->write_bytes, request->length);
	}
}

/* Gives the batch back; returns how many requests it had. */
static uint32_t batch_give(struct iswi_nbd_conn *conn)
{
	struct iswi_nbd_server *server = conn->server;
	struct iswi_nbd_tx *tx = &conn->tx;
	uint32_t count = 0;

	while (tx->batch != NULL) {
		struct iswi_nbd_request *request = tx->batch;

		tx->batch = request->next;
		if (request->error != 0) {
			iswi_count(&server->request_errors, 1);
		} else {
			count_answer(&server->counters, request);
			if (conn->export.counters != NULL)
				count_answer(conn->export.counters, request);
		}
		give(conn, request);
		count++;
	}
	return count;
}

static void batch_break(struct iswi_nbd_conn *conn)
{
	atomic_store_explicit(&conn->tx.broken, true, memory_order_relaxed);
	/* Answers cannot be sent: let the connection's thread see the end. */
	iswi_nbd_conn_shutdown(conn);
	conn->tx.iov_sent = conn->tx.iov_count;
}

/* Sends without waiting. false: the socket is full, some is left. */
static bool batch_push(struct iswi_nbd_conn *conn)
{
	struct iswi_nbd_tx *tx = &conn->tx;

	if (atomic_load_explicit(&tx->broken, memory_order_relaxed))
		return true;
	while (tx->iov_sent < tx->iov_count) {
		struct msghdr message = {.msg_iov = tx->iov + tx->iov_sent,
					 .msg_iovlen = tx->iov_count - tx->iov_sent};
		ssize_t sent = sendmsg(conn->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);

		if (sent >= 0)
			tx->iov_sent += iswi_nbd_iov_advance(
				message.msg_iov, (unsigned)message.msg_iovlen, (size_t)sent);
		else if (errno == EAGAIN || errno == EWOULDBLOCK)
			return false;
		else if (errno != EINTR)
			batch_break(conn);
	}
	return true;
}

/*
 * Called, and returns, with tx->lock held; tx->sending is ours and stays so only when false is
 * returned: the socket is full.
 */
static bool drain(struct iswi_nbd_conn *conn)
{
	struct iswi_nbd_tx *tx = &conn->tx;

	for (;;) {
		uint32_t given;
		bool all;

		if (tx->batch == NULL)
			batch_fill(tx);
		if (tx->batch == NULL)
			break;
		pthread_mutex_unlock(&tx->lock);
		all = batch_push(conn);
		given = all ? batch_give(conn) : 0;
		pthread_mutex_lock(&tx->lock);
		tx->in_flight -= given;
		if (!all)
			return false;
	}
	tx->sending = false;
	if (tx->in_flight == 0)
		pthread_cond_broadcast(&tx->changed);
	return true;
}

void iswi_nbd_complete(struct iswi_nbd_request *request, int error)
{
	struct iswi_nbd_conn *conn = request->conn;
	struct iswi_nbd_tx *tx = &conn->tx;

	request->error = error;
	request->next = NULL;
	pthread_mutex_lock(&tx->lock);
	*tx->last = request;
	tx->last = &request->next;
	if (!tx->sending) {
		tx->sending = true;
		if (!drain(conn)) {
			tx->handed_over = true;
			pthread_cond_broadcast(&tx->changed);
		}
	}
	/* The connection may be gone as soon as the lock is free. */
	pthread_mutex_unlock(&tx->lock);
}

/*
 * Whether the client, which does take its answers, has kept for too long what others are to have.
 * Asked each time the socket has room again: *end_ns, 0 at first, is the waiter's between calls.
 */
static bool overstays(struct iswi_nbd_conn *conn, uint64_t *end_ns)
{
	const struct iswi_nbd_server_config *config = &conn->server->config;
	uint64_t now_ns;

	if (config->backend->crowds == NULL || !config->backend->crowds(&conn->export)) {
		*end_ns = 0;
		return false;
	}
	now_ns = iswi_now_ns();
	if (*end_ns == 0)
		*end_ns = now_ns + (uint64_t)config->send_ms_max * 1000000u;
	return now_ns >= *end_ns;
}

/* The thread that may wait for the client. */
static void *waiter_main(void *opaque)
{
	struct iswi_nbd_conn *conn = opaque;
	struct iswi_nbd_tx *tx = &conn->tx;
	uint64_t crowded_end_ns = 0;

	if (conn->server->config.urgent)
		iswi_thread_urgent();
	pthread_mutex_lock(&tx->lock);
	for (;;) {
		struct pollfd pollfd = {.fd = conn->fd, .events = POLLOUT};
		int ready;

		while (!tx->handed_over && !tx->ending)
			pthread_cond_wait(&tx->changed, &tx->lock);
		if (!tx->handed_over)
			break;
		pthread_mutex_unlock(&tx->lock);
		ready = poll(&pollfd, 1, (int)conn->server->config.send_ms_max);
		if (ready == 0 || overstays(conn, &crowded_end_ns))
			batch_break(conn);
		pthread_mutex_lock(&tx->lock);
		if (drain(conn)) {
			tx->handed_over = false;
			crowded_end_ns = 0;
		}
	}
	pthread_mutex_unlock(&tx->lock);
	return NULL;
}

/* ---- requests */

static struct iswi_nbd_request *take(struct iswi_nbd_conn *conn, const struct nbd_request *wire)
{
	struct iswi_nbd_request *request = conn->server->config.backend->take(&conn->export);

	request->conn = conn;
	request->command = wire->command;
	request->flags = wire->flags;
	request->length = wire->length;
	request->offset = wire->offset;
	request->cookie = wire->cookie;
	request->error = 0;
	pthread_mutex_lock(&conn->tx.lock);
	conn->tx.in_flight++;
	pthread_mutex_unlock(&conn->tx.lock);
	return request;
}

/* The connection ends before the request was submitted. */
static void untake(struct iswi_nbd_conn *conn, struct iswi_nbd_request *request)
{
	give(conn, request);
	pthread_mutex_lock(&conn->tx.lock);
	conn->tx.in_flight--;
	pthread_mutex_unlock(&conn->tx.lock);
}

/* Returns what ends the connection. */
static int serve_one(struct iswi_nbd_conn *conn, const struct nbd_request *wire)
{
	struct iswi_nbd_request *request;
	int error = iswi_nbd_check(&conn->export, wire);
	int err = 0;

	/* A payload nobody wants goes before a request is taken, which it could keep for long. */
	if (wire->command == NBD_CMD_WRITE && error != 0)
		err = iswi_nbd_rx_skip(conn, wire->length);
	if (err != 0)
		return err;
	request = take(conn, wire);
	if (wire->command == NBD_CMD_WRITE && error == 0)
		err = iswi_nbd_rx_copy(conn, request->data, wire->length);
	if (err != 0) {
		untake(conn, request);
		return err;
	}
	if (error != 0) {
		iswi_nbd_complete(request, error);
	} else if (!iswi_nbd_fence_submit(conn, request)) {
		untake(conn, request);
		return -ESHUTDOWN;
	}
	return 0;
}

static int tx_init(struct iswi_nbd_conn *conn)
{
	struct iswi_nbd_tx *tx = &conn->tx;
	int err;

	memset(tx, 0, sizeof(*tx));
	tx->last = &tx->first;
	atomic_init(&tx->broken, false);
	err = -pthread_mutex_init(&tx->lock, NULL);
	if (err != 0)
		return err;
	err = -pthread_mutex_init(&tx->gate, NULL);
	if (err != 0)
		goto err_lock;
	err = -pthread_cond_init(&tx->changed, NULL);
	if (err != 0)
		goto err_gate;
	err = iswi_thread_start(&tx->waiter, "isw-nbd-send", waiter_main, conn);
	if (err != 0)
		goto err_cond;
	return 0;

err_cond:
	pthread_cond_destroy(&tx->changed);
err_gate:
	pthread_mutex_destroy(&tx->gate);
err_lock:
	pthread_mutex_destroy(&tx->lock);
	return err;
}

static void tx_fini(struct iswi_nbd_conn *conn)
{
	struct iswi_nbd_tx *tx = &conn->tx;

	pthread_mutex_lock(&tx->lock);
	while (tx->in_flight > 0 || tx->sending)
		pthread_cond_wait(&tx->changed, &tx->lock);
	tx->ending = true;
	pthread_cond_broadcast(&tx->changed);
	pthread_mutex_unlock(&tx->lock);
	pthread_join(tx->waiter, NULL);
	pthread_cond_destroy(&tx->changed);
	pthread_mutex_destroy(&tx->gate);
	pthread_mutex_destroy(&tx->lock);
}

static void tell_ending(struct iswi_nbd_conn *conn)
{
	const struct iswi_nbd_server_config *config = &conn->server->config;

	if (config->backend->ending != NULL)
		config->backend->ending(config->ctx, &conn->export);
}

int iswi_nbd_async_serve(struct iswi_nbd_conn *conn)
{
	struct nbd_request request;
	int err = tx_init(conn);

	if (err != 0) {
		tell_ending(conn);
		return err;
	}
	iswi_nbd_fence_join(conn);
	do {
		err = iswi_nbd_rx_need(conn, NBD_REQUEST_BYTES);
		if (err == 0)
			err = iswi_nbd_next(conn, &request);
		if (err == 0)
			err = serve_one(conn, &request);
	} while (err == 0);
	iswi_nbd_fence_leave(conn);
	tell_ending(conn);
	tx_fini(conn);
	return err;
}
