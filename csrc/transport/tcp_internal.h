/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the TCP transport; nobody else includes this but its tests.
 *
 * A transfer's way:  submit → pending FIFO → slot (its index and generation are the cookie) →
 * batch (one gathered send) → reply → done.
 *
 * Threads. Any thread may submit; the one that finds nobody sending becomes the sender (owns
 * batch, marked by `sending`) and also takes along what others add meanwhile. A full socket makes
 * it hand that role to the receiver thread (`blocked`). Only the receiver thread reads the socket
 * and writes into READ buffers. When something fails, whoever notices sets FAILING, after which
 * nothing is sent; the receiver thread alone goes from there to DOWN and ends every transfer.
 * So a READ that is queued or in a slot stays there while the receiver thread does something else,
 * and its buf is that thread's alone: there it calls `slow`, between two receives.
 *
 * One lock, a leaf: no callback and no system call that could wait runs under it.
 */
#ifndef ISWI_TCP_INTERNAL_H
#define ISWI_TCP_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

#include "transport/tcp.h"
#include "transport/xfer.h"
#include "util/util.h"
#include "wire/nbd.h"

#define TCP_SLOT_BITS   16 /* of a cookie; the rest is the slot's generation */
#define TCP_SLOT_NONE   UINT32_MAX
#define TCP_BATCH       64  /* requests in one send */
#define TCP_SEND_ROUNDS 8   /* sends for others on one submitter's thread, then handed over */
#define TCP_RECV_ROUNDS 16  /* receives before the tick is looked at again */
#define TCP_TICK_MS     100 /* how late a missed deadline is noticed */
#define TCP_IDLE_MS     1000
#define TCP_WATCH_MS    5   /* how late a slow READ is noticed ... */
#define TCP_LINGER_MS   100 /* ... while one that minds was submitted no longer ago than this */
#define TCP_RX_BYTES    16384

enum tcp_state {
	TCP_UP,
	TCP_FAILING, /* nothing more is sent; submit still queues, so that nothing ends too early */
	TCP_DOWN     /* submit ends transfers at once */
};

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
	struct iswi_queue base;
	struct iswi_queue_events events;
	const struct iswi_clock *clock;
	struct iswi_tcp_export remote;
	uint64_t request_ns_max;
	uint32_t depth;
	int fd;
	int wake_fd;
	pthread_t thread;
	uint64_t now_ns, ticked_ns; /* receiver thread; now_ns: of its last look at the clock */

	pthread_mutex_t lock;
	/* Everything down to the next gap is under lock. */
	pthread_cond_t quiet; /* sending or users fell while not UP */
	enum tcp_state state;
	int down_error;
	uint32_t users; /* threads inside submit; destroy waits for them */
	bool sending;   /* somebody owns batch: the thread that set it or, with blocked, ... */
	bool blocked;   /* ... the receiver thread, which waits for room in the socket */
	struct iswi_xfer *pending_first, *pending_last;
	uint32_t free_slot;
	uint32_t in_flight;  /* slots in use */
	uint64_t watched_ns; /* when the last READ that minds being slow was submitted, or 0 */
	bool dozing;         /* the receiver thread sleeps for longer than such a READ could bear */
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
/* Lock held; then wake the receiver thread, unless on it. The first error stays. */
void iswi_tcp_fail(struct iswi_tcp *tcp, int error);
void iswi_tcp_wake(struct iswi_tcp *tcp);
/* Lock held. Puts the chain at the FIFO's end. */
void iswi_tcp_enqueue(struct iswi_tcp *tcp, struct iswi_xfer *first, struct iswi_xfer *last);
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
