// SPDX-License-Identifier: Apache-2.0
/*
 * Serving an export whose bytes lie in memory: READ is answered straight from there, WRITE lands
 * straight in there. A READ holds its memory until the last byte of its answer has left, a WRITE
 * until its payload has landed. Answers are collected while complete requests are at hand and
 * sent before anything is waited for, so no lone request waits for company and no silent client
 * keeps the memory of another request's answer.
 *
 * A connection is served in turns. Between two of them everything that is half done stands in
 * struct iswi_nbd_memory, so a turn need not wait: neither for the rest of a header or payload nor
 * for a client that is slow to take its answers.
 */
#define _GNU_SOURCE 1
#include <string.h>
#include <sys/socket.h>

#include "wire/nbd_conn.h"

/* Answers of this size together are sent without waiting for the batch to fill. */
#define BATCH_BYTES (1u << 20)
/*
 * What a turn receives, zeroes and sends before it ends. Its last send or payload is not cut there,
 * which would make two system calls of it, and the client wait for the second: so it moves less
 * than twice as much.
 */
#define TURN_BYTES BATCH_BYTES

struct turn {
	int flags;   /* of receives and sends: MSG_DONTWAIT, or 0 where the thread may wait */
	size_t left; /* of TURN_BYTES */
	bool dry;    /* the socket gave less than was asked for: to ask again brings nothing */
};

/* ---- what a request is served with */

static int hold(struct iswi_nbd_conn *conn, struct iswi_nbd_hold *hold_out)
{
	struct iswi_nbd_memory *memory = &conn->memory;

	return conn->server->config.backend->hold(&conn->export, memory->request.offset,
						  memory->request.length, hold_out);
}

static void release(struct iswi_nbd_conn *conn, struct iswi_nbd_hold *hold)
{
	conn->server->config.backend->release(&conn->export, hold);
}

/*
 * Looked at before each wait for the client. Whoever has begun a request gets send_ms_max to bring
 * the rest, or else a byte now and then would hold a slab for as long as it likes; so does whoever
 * has to take an answer, from the last byte on that moved.
 */
static bool is_late(struct iswi_nbd_conn *conn)
{
	const uint64_t now_ns = iswi_now_ns();

	if (conn->memory.deadline_ns == 0)
		conn->memory.deadline_ns =
			now_ns + (uint64_t)conn->server->config.send_ms_max * 1000000u;
	return now_ns >= conn->memory.deadline_ns;
}

/* ---- answers */

static void batch_release(struct iswi_nbd_conn *conn)
{
	struct iswi_nbd_batch *batch = &conn->memory.batch;

	for (unsigned i = 0; i < batch->hold_count; i++)
		release(conn, &batch->holds[i]);
	batch->count = batch->iov_count = batch->iov_sent = batch->hold_count = 0;
	batch->reads = batch->read_bytes = 0;
}

static void count_reads(struct iswi_nbd_counters *counters, const struct iswi_nbd_batch *batch)
{
	iswi_count(&counters->read_requests, batch->reads);
	iswi_count(&counters->read_bytes, batch->read_bytes);
}

static bool batch_is_full(const struct iswi_nbd_batch *batch)
{
	return batch->count == BATCH_REPLIES || batch->read_bytes >= BATCH_BYTES;
}

/* 0: everything has left, and this turn goes on. */
static int batch_send(struct iswi_nbd_conn *conn, struct turn *turn)
{
	struct iswi_nbd_batch *batch = &conn->memory.batch;
	bool was_full;

	batch->sending = true;
	while (batch->iov_sent < batch->iov_count) {
		ssize_t sent;

		if (turn->left == 0)
			return ISWI_NBD_GOES_ON;
		sent = iswi_nbd_send_some(conn, batch->iov + batch->iov_sent,
					  batch->iov_count - batch->iov_sent, TURN_BYTES,
					  turn->flags);
		if (sent == -EAGAIN) /* where it may wait SO_SNDTIMEO has run out */
			return turn->flags == 0 || is_late(conn) ? -ETIMEDOUT : ISWI_NBD_WAITS_OUT;
		if (sent < 0)
			return (int)sent;
		batch->iov_sent +=
			iswi_nbd_iov_advance(batch->iov + batch->iov_sent,
					     batch->iov_count - batch->iov_sent, (size_t)sent);
		turn->left -= ISWI_MIN(turn->left, (size_t)sent);
		conn->memory.deadline_ns = 0;
	}
	batch->sending = false;
	if (batch->reads > 0) {
		count_reads(&conn->server->counters, batch);
		if (conn->export.counters != NULL)
			count_reads(conn->export.counters, batch);
	}
	was_full = batch_is_full(batch);
	batch_release(conn);
	return was_full ? ISWI_NBD_GOES_ON : 0;
}

/* Answers the request with memory->error. held: of a successful READ, taken; else NULL. */
static void answer(struct iswi_nbd_conn *conn, const struct iswi_nbd_hold *held)
{
	struct iswi_nbd_memory *memory = &conn->memory;
	struct iswi_nbd_batch *batch = &memory->batch;
	unsigned char *head = batch->heads[batch->count++];
	const struct nbd_simple_reply reply = {
		.error = nbd_error_from_errno(memory->error),
		.cookie = memory->request.cookie,
	};

	nbd_put_simple_reply(head, &reply);
	batch->iov[batch->iov_count++] =
		(struct iovec){.iov_base = head, .iov_len = NBD_SIMPLE_REPLY_BYTES};
	if (memory->error != 0)
		iswi_count(&conn->server->request_errors, 1);
	if (held != NULL) {
		batch->iov[batch->iov_count++] =
			(struct iovec){.iov_base = held->memory, .iov_len = memory->request.length};
		batch->holds[batch->hold_count++] = *held;
		batch->reads++;
		batch->read_bytes += memory->request.length;
	}
	memory->stage = ISWI_NBD_NEXT;
}

/* ---- input */

/* 0: a receive may follow. begun: part of a request is there. */
static int may_receive(struct iswi_nbd_conn *conn, const struct turn *turn, bool begun)
{
	if (begun && is_late(conn))
		return -EPROTO;
	return turn->dry || turn->left == 0 ? ISWI_NBD_WAITS_IN : 0;
}

/* One receive, after may_receive(). */
static int receive(struct iswi_nbd_conn *conn, struct turn *turn, struct iovec *iov,
		   unsigned iov_count, size_t *got_out)
{
	struct msghdr message = {.msg_iov = iov, .msg_iovlen = iov_count};
	ssize_t got = recvmsg(conn->fd, &message, turn->flags);
	size_t wanted = 0;

	*got_out = 0;
	if (got == 0)
		return -ENODATA;
	if (got < 0) {
		if (errno == EINTR)
			return 0;
		return errno == EAGAIN || errno == EWOULDBLOCK ? ISWI_NBD_WAITS_IN : -errno;
	}
	for (unsigned i = 0; i < iov_count; i++)
		wanted += iov[i].iov_len;
	*got_out = (size_t)got;
	turn->left -= ISWI_MIN(turn->left, (size_t)got);
	turn->dry = turn->flags != 0 && (size_t)got < wanted;
	return 0;
}

/* Receives into rx, behind what lies there. */
static int receive_ahead(struct iswi_nbd_conn *conn, struct turn *turn)
{
	const size_t available = iswi_nbd_rx_available(conn);
	struct iovec iov;
	size_t got;
	int err = may_receive(conn, turn, available > 0);

	if (err != 0)
		return err;
	memmove(conn->rx, conn->rx + conn->rx_head, available);
	conn->rx_head = 0;
	conn->rx_tail = available;
	iov = (struct iovec){.iov_base = conn->rx + available, .iov_len = RX_BYTES - available};
	err = receive(conn, turn, &iov, 1, &got);
	conn->rx_tail += got;
	return err;
}

/* rx is empty: receives the payload where it belongs, and what comes after it into rx. */
static int receive_payload(struct iswi_nbd_conn *conn, struct turn *turn, uint32_t rest)
{
	struct iswi_nbd_memory *memory = &conn->memory;
	struct iovec iov[2];
	size_t wanted, got;
	int err = may_receive(conn, turn, true);

	if (err != 0)
		return err;
	conn->rx_head = conn->rx_tail = 0;
	iov[1] = (struct iovec){.iov_base = conn->rx, .iov_len = RX_BYTES};
	if (memory->stage == ISWI_NBD_SKIP) {
		err = receive(conn, turn, &iov[1], 1, &got);
		conn->rx_tail = got;
		return err;
	}
	wanted = ISWI_MIN((size_t)rest, TURN_BYTES);
	iov[0] = (struct iovec){.iov_base = (char *)memory->hold.memory + memory->done,
				.iov_len = wanted};
	err = receive(conn, turn, iov, wanted == rest ? 2 : 1, &got);
	memory->done += (uint32_t)ISWI_MIN(got, wanted);
	conn->rx_tail = got - ISWI_MIN(got, wanted);
	return err;
}

static void count_write(struct iswi_nbd_counters *counters, uint32_t bytes)
{
	iswi_count(&counters->write_requests, 1);
	iswi_count(&counters->write_bytes, bytes);
}

/* ---- stages: each returns 0 when another step of this turn follows, or ends the turn */

static int step_next(struct iswi_nbd_conn *conn, struct turn *turn)
{
	struct iswi_nbd_memory *memory = &conn->memory;
	int err;

	if (iswi_nbd_rx_available(conn) < NBD_REQUEST_BYTES) {
		if (memory->batch.count > 0)
			return batch_send(conn, turn);
		return receive_ahead(conn, turn);
	}
	memory->deadline_ns = 0;
	err = iswi_nbd_next(conn, &memory->request);
	if (err != 0 && err != -ENODATA)
		return err;
	memory->stage = err == 0 ? ISWI_NBD_BEGIN : ISWI_NBD_LEAVE;
	if (err == 0)
		memory->error = iswi_nbd_check(&conn->export, &memory->request);
	return 0;
}

/* The payload has to be taken off the wire in any case. */
static int begin_write(struct iswi_nbd_conn *conn, struct turn *turn)
{
	struct iswi_nbd_memory *memory = &conn->memory;

	if (iswi_nbd_rx_available(conn) < memory->request.length && memory->batch.count > 0)
		return batch_send(conn, turn);
	if (memory->error == 0)
		memory->error = hold(conn, &memory->hold);
	memory->stage = memory->error == 0 ? ISWI_NBD_LAND : ISWI_NBD_SKIP;
	memory->done = 0;
	return 0;
}

static int begin_read(struct iswi_nbd_conn *conn)
{
	struct iswi_nbd_hold held;

	if (conn->memory.error == 0)
		conn->memory.error = hold(conn, &held);
	answer(conn, conn->memory.error == 0 ? &held : NULL);
	return 0;
}

/* TRIM too: a hole could not be punched into memory that is pinned or registered. */
static int begin_zeroes(struct iswi_nbd_conn *conn, struct turn *turn)
{
	struct iswi_nbd_memory *memory = &conn->memory;

	/* Takes a while: others need not wait for it. */
	if (memory->request.length > BATCH_BYTES && memory->batch.count > 0)
		return batch_send(conn, turn);
	if (memory->error == 0)
		memory->error = hold(conn, &memory->hold);
	memory->stage = ISWI_NBD_ZERO;
	memory->done = 0;
	if (memory->error != 0)
		answer(conn, NULL);
	return 0;
}

static int step_begin(struct iswi_nbd_conn *conn, struct turn *turn)
{
	switch (conn->memory.request.command) {
	case NBD_CMD_READ:
		return begin_read(conn);
	case NBD_CMD_WRITE:
		return begin_write(conn, turn);
	case NBD_CMD_TRIM:
	case NBD_CMD_WRITE_ZEROES:
		return begin_zeroes(conn, turn);
	default: /* FLUSH: memory is as safe as it gets. Unknown ones have their error. */
		answer(conn, NULL);
		return 0;
	}
}

static int step_payload(struct iswi_nbd_conn *conn, struct turn *turn)
{
	struct iswi_nbd_memory *memory = &conn->memory;
	const uint32_t length = memory->request.length;
	char *at = memory->stage == ISWI_NBD_LAND ? memory->hold.memory : NULL;

	memory->done += (uint32_t)iswi_nbd_rx_take(conn, at == NULL ? NULL : at + memory->done,
						   length - memory->done);
	if (memory->done < length)
		return receive_payload(conn, turn, length - memory->done);
	memory->deadline_ns = 0;
	if (memory->stage == ISWI_NBD_LAND) {
		release(conn, &memory->hold);
		count_write(&conn->server->counters, length);
		if (conn->export.counters != NULL)
			count_write(conn->export.counters, length);
	}
	answer(conn, NULL);
	return 0;
}

static int step_zero(struct iswi_nbd_conn *conn, struct turn *turn)
{
	struct iswi_nbd_memory *memory = &conn->memory;
	const uint32_t bytes =
		(uint32_t)ISWI_MIN((size_t)memory->request.length - memory->done, turn->left);

	memset((char *)memory->hold.memory + memory->done, 0, bytes);
	memory->done += bytes;
	turn->left -= bytes;
	if (memory->done < memory->request.length)
		return ISWI_NBD_GOES_ON;
	release(conn, &memory->hold);
	answer(conn, NULL);
	return 0;
}

static int step(struct iswi_nbd_conn *conn, struct turn *turn)
{
	struct iswi_nbd_memory *memory = &conn->memory;

	if (memory->batch.sending || batch_is_full(&memory->batch))
		return batch_send(conn, turn);
	switch (memory->stage) {
	case ISWI_NBD_NEXT:
		return step_next(conn, turn);
	case ISWI_NBD_BEGIN:
		return step_begin(conn, turn);
	case ISWI_NBD_LAND:
	case ISWI_NBD_SKIP:
		return step_payload(conn, turn);
	case ISWI_NBD_ZERO:
		return step_zero(conn, turn);
	default: /* ISWI_NBD_LEAVE: what was asked before DISC is still answered */
		return memory->batch.count > 0 ? batch_send(conn, turn) : -ENODATA;
	}
}

void iswi_nbd_memory_begin(struct iswi_nbd_conn *conn)
{
	/* Not all of it: a connection that asks for nothing does not touch its batch. */
	memset(&conn->memory, 0, offsetof(struct iswi_nbd_memory, batch.iov));
}

int iswi_nbd_memory_turn(struct iswi_nbd_conn *conn, int flags)
{
	struct turn turn = {.flags = flags, .left = TURN_BYTES};
	int result;

	/* For what was taken off the wire in an earlier turn; iswi_nbd_next() asks again. */
	if (atomic_load(&conn->closing))
		return -ESHUTDOWN;
	do
		result = step(conn, &turn);
	while (result == 0);
	return result;
}

void iswi_nbd_memory_end(struct iswi_nbd_conn *conn)
{
	struct iswi_nbd_memory *memory = &conn->memory;

	batch_release(conn);
	if (memory->stage == ISWI_NBD_LAND || memory->stage == ISWI_NBD_ZERO)
		release(conn, &memory->hold);
}
