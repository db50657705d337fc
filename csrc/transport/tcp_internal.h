/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the TCP transport; nobody else includes this but its tests.
 *
 * A transfer's way:  submit → pending FIFO → slot (its index and generation are the cookie) →
 * batch (one gathered send) → reply → done.
 *
 * Threads: see queue.h. A submitter that finds nobody sending becomes the sender (owns batch,
 * marked by `sending`) and also takes along what others add meanwhile. A full socket makes it hand
 * that role to the receiver thread (`blocked`). Only the receiver thread reads the socket and
 * writes into READ buffers: there it calls `slow`, between two receives.
 */
#ifndef ISWI_TCP_INTERNAL_H
#define ISWI_TCP_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

#include "transport/queue.h"
#include "transport/tcp.h"
#include "util/util.h"
#include "wire/nbd.h"

#define TCP_SLOT_BITS   16 /* of a cookie; the rest is the slot's generation */
#define TCP_SLOT_NONE   UINT32_MAX
#define TCP_BATCH       64 /* requests in one send */
#define TCP_SEND_ROUNDS 8  /* sends for others on one submitter's thread, then handed over */
#define TCP_RECV_ROUNDS 16 /* receives before the tick is looked at again */
#define TCP_RX_BYTES    16384

struct tcp_slot {
	struct iswi_xfer *xfer; /* NULL: free */
	uint64_t generation;    /* of the present or, when free, the last use */
	uint32_t next_free;
	int error;    /* the reply's, valid with replied */
	bool sent;    /* the sender will not read xfer->buf again */
	bool replied; /* a write's reply came before its last byte was known to be sent */
};

struct tcp_ended {
	struct iswi_xfer *xfer;
	int error;
};

/* What the present sender has under way. Its owner alone touches it, without the lock. */
struct tcp_batch {
	uint8_t header[TCP_BATCH][NBD_REQUEST_BYTES];
	struct iovec iov[TCP_BATCH * 2];
	uint32_t iov_first, iov_count;
	uint64_t sent_bytes;
	/* The writes in it: their buffers are given back when sent_bytes reaches end. */
	struct {
		uint64_t end;
		uint32_t slot;
	} write[TCP_BATCH];
	uint32_t write_first, write_count;
};

/* Received bytes not yet used, and the READ whose payload is arriving. Receiver thread only. */
struct tcp_receiver {
	struct iswi_xfer *xfer;
	uint32_t slot;
	uint32_t filled;
	uint32_t start, end;
	uint8_t bytes[TCP_RX_BYTES];
};

struct iswi_tcp_export {
	uint64_t bytes;
	uint32_t request_bytes_max;
};

struct iswi_tcp {
	struct iswi_tq tq;
	struct iswi_tcp_export remote;
	uint32_t depth;
	int fd;

	/* Under tq.lock, whose `quiet` also says that sending fell. */
	bool sending; /* a thread owns batch: the one that set this or, with blocked, ... */
	bool blocked; /* ... the receiver thread, which waits for room in the socket */
	uint32_t free_slot;
	uint32_t in_flight; /* slots in use */
	struct tcp_slot *slot;

	struct tcp_batch batch;
	struct tcp_receiver rx;
};

/* ---- tcp_handshake.c: blocking, until deadline_ns on CLOCK_MONOTONIC */
int iswi_tcp_dial(const struct iswi_tcp_config *config, uint64_t deadline_ns, int *fd_out,
		  struct isw_error *error);
int iswi_tcp_handshake(int fd, const struct iswi_tcp_config *config, uint64_t deadline_ns,
		       struct iswi_tcp_export *export_out, struct isw_error *error);

/* ---- tcp_send.c */
/* Lock held. */
void iswi_tcp_slot_free(struct iswi_tcp *tcp, uint32_t index);
/* Lock held. True: the caller is now the sender and must call iswi_tcp_send. */
bool iswi_tcp_claim_sender(struct iswi_tcp *tcp);
/* Lock held. Moves transfers from the FIFO to slots and the batch. False: none could be. */
bool iswi_tcp_batch_build(struct iswi_tcp *tcp);
/*
 * Lock held. n more bytes of the batch are in the socket: gives back the writes that are out, and
 * stores those whose reply came meanwhile. Returns how many it stored, at most TCP_BATCH.
 */
uint32_t iswi_tcp_batch_advance(struct iswi_tcp *tcp, uint64_t n, struct tcp_ended *ended_out);
/* The sender only, lock not held. Sends until nothing can be sent, then gives the role up. */
void iswi_tcp_send(struct iswi_tcp *tcp, bool on_receiver);

/* ---- tcp_recv.c: receiver thread only, lock not held; sans I/O */
/* Where the next bytes go: fills at most two, returns how many. */
uint32_t iswi_tcp_rx_space(struct iswi_tcp *tcp, struct iovec *iov_out);
/* n bytes were put there. Ends the transfers they complete. -EPROTO: not a reply of ours. */
int iswi_tcp_rx_advance(struct iswi_tcp *tcp, size_t n);

/* ---- tcp.c */
/* A queue without connection or thread. */
int iswi_tcp_alloc(uint32_t depth, struct iswi_tcp **tcp_out);
void iswi_tcp_free(struct iswi_tcp *tcp);

#endif
