// SPDX-License-Identifier: Apache-2.0
/* NBD over TCP: the queue's life, and its receiver thread. See tcp_internal.h first. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport/tcp_internal.h"

#define NS_PER_MS    1000000ull
#define REMOTE_DEPTH 256u /* requests on the wire of a remote's queue */

/* A donor that is gone is noticed on an idle connection within about half a minute. */
#define KEEPALIVE_IDLE_S     15
#define KEEPALIVE_INTERVAL_S 5
#define KEEPALIVE_PROBES     3

_Static_assert(ISWI_TCP_DEPTH_MAX <= 1u << TCP_SLOT_BITS, "a slot's index must fit in a cookie");

/* ---------------------------------------------------------------- any thread */

static struct iswi_tcp *tcp_of(struct iswi_tq *tq)
{
	return ISWI_CONTAINER(tq, struct iswi_tcp, tq);
}

static int check(struct iswi_tq *tq, const struct iswi_xfer *xfer)
{
	const struct iswi_tcp_export *remote = &tcp_of(tq)->remote;

	return xfer->length == 0 || xfer->length > remote->request_bytes_max ||
			       xfer->length > remote->bytes ||
			       xfer->offset > remote->bytes - xfer->length
		       ? -EINVAL
		       : 0;
}

static bool queued(struct iswi_tq *tq)
{
	return iswi_tcp_claim_sender(tcp_of(tq));
}

static void send_queued(struct iswi_tq *tq)
{
	iswi_tcp_send(tcp_of(tq), false);
}

static void tcp_submit(struct iswi_queue *queue, struct iswi_xfer *first)
{
	iswi_tq_submit(iswi_tq_of(queue), first, check, queued, send_queued);
}

static void tcp_destroy(struct iswi_queue *queue)
{
	struct iswi_tcp *tcp = tcp_of(iswi_tq_of(queue));

	iswi_tq_join(&tcp->tq);
	iswi_tcp_free(tcp);
}

/* ---------------------------------------------------------------- receiver thread */

/*
 * Receives until the socket is empty, also after a short read. A thread that waits for a page goes
 * on when the kernel has ended its block request. The kernel leaves that to ksoftirqd, or to the
 * next call of this thread into the network code, and that call is sooner.
 */
static int receive(struct iswi_tcp *tcp)
{
	for (int round = 0; round < TCP_RECV_ROUNDS; round++) {
		struct iovec iov[2];
		struct msghdr message = {.msg_iov = iov};
		ssize_t n;
		int err;

		message.msg_iovlen = iswi_tcp_rx_space(tcp, iov);
		n = recvmsg(tcp->fd, &message, MSG_DONTWAIT);
		if (n == 0)
			return -ECONNRESET;
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -errno;
		err = iswi_tcp_rx_advance(tcp, (size_t)n);
		if (err < 0)
			return err;
	}
	return 0;
}

/* Transfers in the FIFO are younger than those in slots, so only the slots are looked at. */
static int check_deadlines(struct iswi_tcp *tcp)
{
	bool missed = false;

	pthread_mutex_lock(&tcp->tq.lock);
	for (uint32_t i = 0; i < tcp->depth && !missed; i++)
		missed = tcp->slot[i].xfer != NULL &&
			 tcp->slot[i].xfer->deadline_ns <= tcp->tq.now_ns;
	pthread_mutex_unlock(&tcp->tq.lock);
	return missed ? -ETIMEDOUT : 0;
}

/*
 * Only this thread ends what is in a slot or in the FIFO, so it stays there without the lock. What
 * exceeds a batch follows at the next tick.
 */
static void call_slow(struct iswi_tcp *tcp)
{
	struct iswi_xfer *slow[TCP_BATCH];
	uint32_t count = 0;

	pthread_mutex_lock(&tcp->tq.lock);
	for (uint32_t i = 0; i < tcp->depth && count < TCP_BATCH; i++)
		if (tcp->slot[i].xfer != NULL &&
		    iswi_xfer_became_slow(tcp->slot[i].xfer, tcp->tq.now_ns))
			slow[count++] = tcp->slot[i].xfer;
	count = iswi_tq_slow_pending(&tcp->tq, slow, count, TCP_BATCH);
	pthread_mutex_unlock(&tcp->tq.lock);
	for (uint32_t i = 0; i < count; i++)
		slow[i]->slow(slow[i], slow[i] == tcp->rx.xfer ? tcp->rx.filled : 0);
}

/* Waits for something to do and does it. */
static int receiver_round(struct iswi_tcp *tcp, bool idle, bool watched, bool blocked)
{
	struct pollfd fds[2] = {
		{.fd = tcp->fd, .events = (short)(blocked ? POLLIN | POLLOUT : POLLIN)},
		{.fd = tcp->tq.wake_fd, .events = POLLIN},
	};
	int n, err = 0;

	n = poll(fds, 2, (int)iswi_tq_wait_ms(&tcp->tq, idle, watched));
	if (n < 0)
		return errno == EINTR ? 0 : -errno;
	if (fds[1].revents != 0)
		err = iswi_tq_woken(&tcp->tq);
	if ((fds[0].revents & POLLOUT) != 0) {
		pthread_mutex_lock(&tcp->tq.lock);
		tcp->blocked = false;
		pthread_mutex_unlock(&tcp->tq.lock);
		iswi_tcp_send(tcp, true);
	}
	if (err == 0 && (fds[0].revents & ~POLLOUT) != 0)
		err = receive(tcp);
	if (err < 0 || !iswi_tq_tick(&tcp->tq, watched, n == 0))
		return err;
	call_slow(tcp);
	return check_deadlines(tcp);
}

/* FAILING → DOWN. Says goodbye only when we end the connection and nothing is under way. */
static void go_down(struct iswi_tcp *tcp)
{
	struct iswi_xfer *first = NULL, **link = &first;
	bool polite;
	int error;

	pthread_mutex_lock(&tcp->tq.lock);
	error = tcp->tq.down_error;
	polite = error == -ESHUTDOWN && tcp->in_flight == 0 && !tcp->sending;
	pthread_mutex_unlock(&tcp->tq.lock);
	if (polite) {
		uint8_t goodbye[NBD_REQUEST_BYTES];

		nbd_put_request(goodbye, &(struct nbd_request){.command = NBD_CMD_DISC});
		/* Best effort: a donor copes with a plain close. */
		(void)!send(tcp->fd, goodbye, sizeof(goodbye), MSG_DONTWAIT | MSG_NOSIGNAL);
	}
	shutdown(tcp->fd, SHUT_RDWR);
	tcp->tq.events.down(tcp->tq.events.ctx, error);

	pthread_mutex_lock(&tcp->tq.lock);
	/* A sender inside its system call still reads buffers. That call does not wait. */
	while (tcp->sending && !tcp->blocked)
		pthread_cond_wait(&tcp->tq.quiet, &tcp->tq.lock);
	tcp->tq.state = ISWI_TQ_DOWN;
	for (uint32_t i = 0; i < tcp->depth; i++) {
		struct iswi_xfer *xfer = tcp->slot[i].xfer;

		if (xfer == NULL)
			continue;
		iswi_tcp_slot_free(tcp, i);
		*link = xfer;
		link = &xfer->next;
	}
	*link = tcp->tq.pending_first;
	tcp->tq.pending_first = NULL;
	tcp->rx.xfer = NULL;
	pthread_mutex_unlock(&tcp->tq.lock);
	iswi_xfer_end_chain(first, error);
}

static void *receiver_main(void *arg)
{
	struct iswi_tcp *tcp = arg;

	for (;;) {
		bool up, sender, idle, watched, blocked;
		int err;

		pthread_mutex_lock(&tcp->tq.lock);
		up = tcp->tq.state == ISWI_TQ_UP;
		/* Replies made room for transfers that wait. */
		sender = iswi_tcp_claim_sender(tcp);
		idle = tcp->in_flight == 0 && tcp->tq.pending_first == NULL;
		watched = iswi_tq_watch(&tcp->tq);
		blocked = tcp->blocked;
		pthread_mutex_unlock(&tcp->tq.lock);
		if (!up)
			break;
		if (sender) {
			iswi_tcp_send(tcp, true);
			continue;
		}
		err = receiver_round(tcp, idle, watched, blocked);
		if (err < 0)
			iswi_tq_fail_now(&tcp->tq, err);
	}
	go_down(tcp);
	return NULL;
}

/* ---------------------------------------------------------------- making and freeing */

int iswi_tcp_alloc(uint32_t depth, struct iswi_tcp **tcp_out)
{
	struct iswi_tcp *tcp = calloc(1, sizeof(*tcp));
	int err = -ENOMEM;

	if (tcp == NULL)
		return err;
	tcp->slot = calloc(depth, sizeof(*tcp->slot));
	if (tcp->slot != NULL)
		err = iswi_tq_init(&tcp->tq, &iswi_transport_tcp, NULL);
	if (err < 0) {
		free(tcp->slot);
		free(tcp);
		return err;
	}
	tcp->depth = depth;
	tcp->fd = -1;
	for (uint32_t i = 0; i < depth; i++)
		tcp->slot[i].next_free = i + 1 < depth ? i + 1 : TCP_SLOT_NONE;
	*tcp_out = tcp;
	return 0;
}

void iswi_tcp_free(struct iswi_tcp *tcp)
{
	if (tcp->fd >= 0)
		close(tcp->fd);
	iswi_tq_fini(&tcp->tq);
	free(tcp->slot);
	free(tcp);
}

/* Results are right without any of these, so a refusal is no error. */
static void tune(int fd, uint32_t request_ms_max)
{
	const struct {
		int level, option, value;
	} options[] = {
		{SOL_SOCKET, SO_KEEPALIVE, 1},
		{IPPROTO_TCP, TCP_KEEPIDLE, KEEPALIVE_IDLE_S},
		{IPPROTO_TCP, TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S},
		{IPPROTO_TCP, TCP_KEEPCNT, KEEPALIVE_PROBES},
		{IPPROTO_TCP, TCP_USER_TIMEOUT, (int)ISWI_MIN(request_ms_max, INT32_MAX)},
	};

	for (size_t i = 0; i < ISWI_ARRAY_LEN(options); i++)
		setsockopt(fd, options[i].level, options[i].option, &options[i].value,
			   sizeof(options[i].value));
}

static int config_check(const struct iswi_tcp_config *config, struct isw_error *error)
{
	if (config->depth == 0 || config->depth > ISWI_TCP_DEPTH_MAX)
		return iswi_error(error, -EINVAL, "queue depth %u is not between 1 and %u",
				  config->depth, ISWI_TCP_DEPTH_MAX);
	if (config->connect_ms_max == 0 || config->request_ms_max == 0)
		return iswi_error(error, -EINVAL, "a time limit of 0 ms for %s",
				  config->request_ms_max == 0 ? "requests" : "connecting");
	if (strlen(config->export_name) > NBD_NAME_BYTES_MAX)
		return iswi_error(error, -EINVAL, "an export name of more than %u bytes",
				  NBD_NAME_BYTES_MAX);
	return 0;
}

int iswi_tcp_connect(const struct iswi_tcp_config *config, const struct iswi_queue_events *events,
		     struct iswi_queue **queue_out, struct isw_error *error)
{
	uint64_t deadline_ns = iswi_now_ns() + config->connect_ms_max * NS_PER_MS;
	struct iswi_tcp *tcp;
	int err;

	err = config_check(config, error);
	if (err < 0)
		return err;
	err = iswi_tcp_alloc(config->depth, &tcp);
	if (err < 0)
		return iswi_error(error, err, "a connection cannot be made: %s", strerror(-err));
	if (config->clock != NULL)
		tcp->tq.clock = config->clock;
	iswi_tq_begin(&tcp->tq, events, config->request_ms_max);
	err = iswi_tcp_dial(config, deadline_ns, &tcp->fd, error);
	if (err < 0)
		goto err_free;
	err = iswi_tcp_handshake(tcp->fd, config, deadline_ns, &tcp->remote, error);
	if (err < 0)
		goto err_free;
	tune(tcp->fd, config->request_ms_max);
	err = iswi_thread_start(&tcp->tq.thread,
				config->thread_name != NULL ? config->thread_name : "isw-tcp",
				receiver_main, tcp);
	if (err < 0) {
		iswi_error(error, err, "cannot start a connection's thread: %s", strerror(-err));
		goto err_free;
	}
	*queue_out = &tcp->tq.base;
	return 0;

err_free:
	iswi_tcp_free(tcp);
	return err;
}

static int tcp_connect(const isw_engine *engine, const struct isw_remote_config *config,
		       uint32_t number, uint32_t transfer_bytes_max,
		       const struct iswi_queue_events *events, struct iswi_queue **queue_out,
		       struct isw_error *error)
{
	const struct iswi_tcp_config tcp = {
		.host = config->host,
		.port = config->port,
		.export_name = config->tickets[number],
		.export_bytes_min = config->export_bytes,
		.transfer_bytes_max = transfer_bytes_max,
		.depth = REMOTE_DEPTH,
		.connect_ms_max = config->connect_ms_max,
		.request_ms_max = config->request_ms_max,
		.thread_name = "isw-remote",
	};

	(void)engine;
	return iswi_tcp_connect(&tcp, events, queue_out, error);
}

const struct iswi_transport_ops iswi_transport_tcp = {
	.name = "tcp",
	.kind = ISW_TRANSPORT_TCP,
	.connect = tcp_connect,
	.submit = tcp_submit,
	.shutdown = iswi_tq_shutdown,
	.destroy = tcp_destroy,
};
