// SPDX-License-Identifier: Apache-2.0
/*
 * libFuzzer over the NBD client's reply parser: whatever a donor sends, each transfer ends at most
 * once, no byte lands outside the buffers of the READs in flight, and the parser either goes on
 * or reports -EPROTO. No sockets and no threads: the parser is sans I/O.
 *
 * The input is a list of steps of two bytes: submit a transfer, deliver raw bytes of the input, a
 * reply header with the cookie of a transfer (no fuzzer would guess one) or zeros as payload, or
 * let the sender finish.
 * Built and run by tests/fuzz/fuzzers.py.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "transport/tcp_internal.h"

#define DEPTH     4
#define OPS       8
#define BUF_BYTES (3u * ISW_PAGE_BYTES)

struct op {
	struct iswi_xfer xfer;
	char *buf; /* from malloc, so that ASan sees an overrun */
	bool busy;
	uint64_t cookie; /* 0: not known yet */
};

struct input {
	const uint8_t *at;
	size_t left;
};

static void op_done(struct iswi_xfer *xfer, int error)
{
	struct op *op = ISWI_CONTAINER(xfer, struct op, xfer);

	if (!op->busy || error > 0)
		abort();
	op->busy = false;
	/* Ours again: the parser must not write here any more. */
	free(op->buf);
	op->buf = NULL;
}

static uint8_t take(struct input *input)
{
	if (input->left == 0)
		return 0;
	input->left--;
	return *input->at++;
}

/* What the sender would do, without a socket: everything is sent at once, or only begun. */
static void submit(struct iswi_tcp *tcp, struct op *ops, uint8_t what)
{
	struct tcp_ended ended[TCP_BATCH];
	struct op *op = &ops[what % OPS];
	uint64_t bytes = 0;
	uint32_t count;

	if (op->busy || tcp->free_slot == TCP_SLOT_NONE ||
	    tcp->batch.iov_first < tcp->batch.iov_count)
		return;
	memset(&op->xfer, 0, sizeof(op->xfer));
	op->xfer.kind = (what & 0x10) != 0 ? ISWI_XFER_WRITE : ISWI_XFER_READ;
	op->xfer.length = (1 + (what >> 5) % 3) * ISW_PAGE_BYTES;
	op->xfer.done = op_done;
	op->buf = malloc(op->xfer.length);
	if (op->buf == NULL)
		abort();
	memset(op->buf, 0, op->xfer.length);
	op->xfer.buf = op->buf;
	op->busy = true;
	iswi_xfer_append(&tcp->tq.pending_first, &tcp->tq.pending_last, &op->xfer);
	if (!iswi_tcp_batch_build(tcp))
		abort();
	op->cookie = nbd_get64(tcp->batch.header[0] + 8);
	for (uint32_t i = 0; i < tcp->batch.iov_count; i++)
		bytes += tcp->batch.iov[i].iov_len;
	/* With the top bit the rest stays unsent: see finish_send. */
	count = iswi_tcp_batch_advance(tcp, (what & 0x80) != 0 ? bytes - 1 : bytes, ended);
	if (count != 0)
		abort();
}

static void finish_send(struct iswi_tcp *tcp)
{
	struct tcp_ended ended[TCP_BATCH];
	uint32_t count = 0;

	if (tcp->batch.iov_first < tcp->batch.iov_count)
		count = iswi_tcp_batch_advance(tcp, 1, ended);
	for (uint32_t i = 0; i < count; i++)
		ended[i].xfer->done(ended[i].xfer, ended[i].error);
}

static size_t put(struct iswi_tcp *tcp, const uint8_t *data, size_t bytes, int *err)
{
	struct iovec iov[2];
	uint32_t count = iswi_tcp_rx_space(tcp, iov);
	size_t done = 0;

	for (uint32_t i = 0; i < count; i++) {
		size_t n = ISWI_MIN(bytes - done, iov[i].iov_len);

		memcpy(iov[i].iov_base, data + done, n);
		done += n;
	}
	*err = iswi_tcp_rx_advance(tcp, done);
	return done;
}

static int deliver(struct iswi_tcp *tcp, const uint8_t *data, size_t bytes)
{
	int err = 0;

	while (bytes > 0 && err == 0) {
		size_t n = put(tcp, data, bytes, &err);

		data += n;
		bytes -= n;
	}
	return err;
}

/* A well-made reply header to a transfer that is, or once was, in flight. */
static int deliver_header(struct iswi_tcp *tcp, const struct op *op, uint8_t how)
{
	uint8_t bytes[NBD_SIMPLE_REPLY_BYTES];

	nbd_put_simple_reply(bytes, &(struct nbd_simple_reply){how & 0x3, op->cookie});
	return deliver(tcp, bytes, sizeof(bytes) - ((how & 0x4) != 0 ? how >> 4 : 0));
}

static void run(struct iswi_tcp *tcp, struct op *ops, struct input *input)
{
	int err = 0;

	while (input->left > 0 && err == 0) {
		static const uint8_t zeros[BUF_BYTES];
		uint8_t step = take(input), what = take(input);
		size_t n;

		switch (step % 5) {
		case 0:
			submit(tcp, ops, what);
			break;
		case 1:
			n = ISWI_MIN((size_t)what, input->left);
			err = deliver(tcp, input->at, n);
			input->at += n;
			input->left -= n;
			break;
		case 2:
			err = deliver_header(tcp, &ops[step / 5 % OPS], what);
			break;
		case 3:
			err = deliver(tcp, zeros, (size_t)what * 48);
			break;
		default:
			finish_send(tcp);
			break;
		}
	}
	if (err != 0 && err != -EPROTO)
		abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input input = {data, size};
	struct op ops[OPS] = {0};
	struct iswi_tcp *tcp;
	uint32_t busy = 0;

	if (iswi_tcp_alloc(DEPTH, &tcp) < 0)
		abort();
	run(tcp, ops, &input);
	for (uint32_t i = 0; i < OPS; i++) {
		busy += ops[i].busy;
		free(ops[i].buf);
	}
	if (busy != tcp->in_flight)
		abort();
	iswi_tcp_free(tcp);
	return 0;
}
