// SPDX-License-Identifier: Apache-2.0
/* NBD over TCP: the queue's life, and its receiver thread. See tcp_internal.h first. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
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

/*
 * Transfers that must not go on the wire are chained to *bad_out, the rest is stamped. Returns the
 * time when one of these minds being slow, else 0.
 */
static uint64_t chain_check(struct iswi_tcp *tcp, struct iswi_xfer *xfer,
			    struct iswi_xfer **good_first, struct iswi_xfer **good_last,
			    struct iswi_xfer **bad_out)
{
	uint64_t now_ns = tcp->clock->now_ns(tcp->clock->ctx), watched_ns = 0;

	*good_first = NULL;
	*good_last = NULL;
	*bad_out = NULL;
	while (xfer != NULL) {
		struct iswi_xfer *next = xfer->next;

		if (xfer->length == 0 || xfer->length > tcp->remote.request_bytes_max ||
		    xfer->length > tcp->remote.bytes ||
		    xfer->offset > tcp->remote.bytes - xfer->length) {
			xfer->next = *bad_out;
			*bad_out = xfer;
		} else {
			xfer->submitted_ns = now_ns;
			xfer->deadline_ns = now_ns + tcp->request_ns_max;
			if (iswi_xfer_minds(xfer))
				watched_ns = now_ns;
			xfer->next = NULL;
			if (*good_last == NULL)
				*good_first = xfer;
			else
				(*good_last)->next = xfer;
			*good_last = xfer;
		}
		xfer = next;
	}
	return watched_ns;
}

static void tcp_submit(struct iswi_queue *queue, struct iswi_xfer *first)
{
	struct iswi_tcp *tcp = ISWI_CONTAINER(queue, struct iswi_tcp, base);
	struct iswi_xfer *last, *bad;
	bool sender, down, wake;
	uint64_t watched_ns;

	watched_ns = chain_check(tcp, first, &first, &last, &bad);
	if (first != NULL) {
		pthread_mutex_lock(&tcp->lock);
		down = tcp->state == TCP_DOWN;
		sender = false;
		wake = watched_ns != 0 && tcp->dozing;
		if (watched_ns != 0) {
			tcp->watched_ns = watched_ns;
			tcp->dozing = false;
		}
		if (!down) {
			iswi_tcp_enqueue(tcp, first, last);
			sender = iswi_tcp_claim_sender(tcp);
			/* From here on another thread may end the transfers: keeps destroy away. */
			tcp->users++;
		}
		pthread_mutex_unlock(&tcp->lock);
		if (sender)
			iswi_tcp_send(tcp, false);
		if (wake && !down)
			iswi_tcp_wake(tcp);
		if (down) {
			iswi_xfer_end_chain(first, -ESHUTDOWN);
		} else {
			pthread_mutex_lock(&tcp->lock);
			tcp->users--;
			if (tcp->state != TCP_UP)
				pthread_cond_broadcast(&tcp->quiet);
			pthread_mutex_unlock(&tcp->lock);
		}
	}
	iswi_xfer_end_chain(bad, -EINVAL);
}

static void tcp_shutdown(struct iswi_queue *queue)
{
	struct iswi_tcp *tcp = ISWI_CONTAINER(queue, struct iswi_tcp, base);

	pthread_mutex_lock(&tcp->lock);
	iswi_tcp_fail(tcp, -ESHUTDOWN);
	pthread_mutex_unlock(&tcp->lock);
	iswi_tcp_wake(tcp);
}

static void tcp_destroy(struct iswi_queue *queue)
{
	struct iswi_tcp *tcp = ISWI_CONTAINER(queue, struct iswi_tcp, base);

	tcp_shutdown(queue);
	pthread_join(tcp->thread, NULL);
	/* Every transfer was ended; a submitter may still be on its way out. */
	pthread_mutex_lock(&tcp->lock);
	while (tcp->users > 0)
		pthread_cond_wait(&tcp->quiet, &tcp->lock);
	pthread_mutex_unlock(&tcp->lock);
	iswi_tcp_free(tcp);
}

/* ---------------------------------------------------------------- receiver thread */

static int receive(struct iswi_tcp *tcp)
{
	for (int round = 0; round < TCP_RECV_ROUNDS; round++) {
		struct iovec iov[2];
		struct msghdr message = {.msg_iov = iov};
		size_t room = 0;
		ssize_t n;
		int err;

		message.msg_iovlen = iswi_tcp_rx_space(tcp, iov);
		for (size_t i = 0; i < message.msg_iovlen; i++)
			room += iov[i].iov_len;
		n = recvmsg(tcp->fd, &message, MSG_DONTWAIT);
		if (n == 0)
			return -ECONNRESET;
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -errno;
		err = iswi_tcp_rx_advance(tcp, (size_t)n);
		/* Less than asked for: the socket is empty, poll says when it is not. */
		if (err < 0 || (size_t)n < room)
			return err;
	}
	return 0;
}

/* What waits in the FIFO is younger than what is in the slots: looking at these is enough. */
static int check_deadlines(struct iswi_tcp *tcp, uint64_t now_ns)
{
	bool missed = false;

	pthread_mutex_lock(&tcp->lock);
	for (uint32_t i = 0; i < tcp->depth && !missed; i++)
		missed = tcp->slot[i].xfer != NULL && tcp->slot[i].xfer->deadline_ns <= now_ns;
	pthread_mutex_unlock(&tcp->lock);
	return missed ? -ETIMEDOUT : 0;
}

/*
 * What is in a slot or in the FIFO is ended by this thread only, so it is there still when the lock
 * is not. More than a batch: the rest at the next tick.
 */
static void call_slow(struct iswi_tcp *tcp, uint64_t now_ns)
{
	struct iswi_xfer *slow[TCP_BATCH];
	uint32_t count = 0;

	pthread_mutex_lock(&tcp->lock);
	for (uint32_t i = 0; i < tcp->depth && count < TCP_BATCH; i++)
		if (tcp->slot[i].xfer != NULL && iswi_xfer_became_slow(tcp->slot[i].xfer, now_ns))
			slow[count++] = tcp->slot[i].xfer;
	for (struct iswi_xfer *xfer = tcp->pending_first; xfer != NULL && count < TCP_BATCH;
	     xfer = xfer->next)
		if (iswi_xfer_became_slow(xfer, now_ns))
			slow[count++] = xfer;
		else if (iswi_xfer_minds(xfer))
			break; /* those behind it are younger */
	pthread_mutex_unlock(&tcp->lock);
	for (uint32_t i = 0; i < count; i++)
		slow[i]->slow(slow[i], slow[i] == tcp->rx.xfer ? tcp->rx.filled : 0);
}

static int tick(struct iswi_tcp *tcp, uint32_t tick_ms, bool timed_out)
{
	uint64_t now_ns = tcp->clock->now_ns(tcp->clock->ctx);

	tcp->now_ns = now_ns;
	if (!timed_out && now_ns - tcp->ticked_ns < tick_ms * NS_PER_MS)
		return 0;
	tcp->ticked_ns = now_ns;
	call_slow(tcp, now_ns);
	return check_deadlines(tcp, now_ns);
}

/*
 * Waits for something to do and does it. An idle connection wakes up seldom, but not later than a
 * request submitted meanwhile could miss its deadline.
 */
static int receiver_round(struct iswi_tcp *tcp, bool idle, bool watched, bool blocked)
{
	int tick_ms = watched ? TCP_WATCH_MS : TCP_TICK_MS;
	int idle_ms = (int)ISWI_MIN((uint64_t)TCP_IDLE_MS,
				    ISWI_MAX(tcp->request_ns_max / NS_PER_MS, TCP_TICK_MS));
	struct pollfd fds[2] = {
		{.fd = tcp->fd, .events = (short)(blocked ? POLLIN | POLLOUT : POLLIN)},
		{.fd = tcp->wake_fd, .events = POLLIN},
	};
	int n, err = 0;

	n = poll(fds, 2, idle && !watched ? idle_ms : tick_ms);
	if (n < 0)
		return errno == EINTR ? 0 : -errno;
	if (fds[1].revents != 0) {
		uint64_t count;

		if (read(tcp->wake_fd, &count, sizeof(count)) < 0 && errno != EAGAIN)
			return -errno;
	}
	if ((fds[0].revents & POLLOUT) != 0) {
		pthread_mutex_lock(&tcp->lock);
		tcp->blocked = false;
		pthread_mutex_unlock(&tcp->lock);
		iswi_tcp_send(tcp, true);
	}
	if ((fds[0].revents & ~POLLOUT) != 0)
		err = receive(tcp);
	return err < 0 ? err : tick(tcp, (uint32_t)tick_ms, n == 0);
}

/* FAILING → DOWN. Polite only when nothing is under way, and only by our own wish. */
static void go_down(struct iswi_tcp *tcp)
{
	struct iswi_xfer *first = NULL, **link = &first;
	bool polite;
	int error;

	pthread_mutex_lock(&tcp->lock);
	error = tcp->down_error;
	polite = error == -ESHUTDOWN && tcp->in_flight == 0 && !tcp->sending;
	pthread_mutex_unlock(&tcp->lock);
	if (polite) {
		uint8_t goodbye[NBD_REQUEST_BYTES];

		nbd_put_request(goodbye, &(struct nbd_request){.command = NBD_CMD_DISC});
		/* Best effort: a donor copes with a plain close. */
		(void)!send(tcp->fd, goodbye, sizeof(goodbye), MSG_DONTWAIT | MSG_NOSIGNAL);
	}
	shutdown(tcp->fd, SHUT_RDWR);
	tcp->events.down(tcp->events.ctx, error);

	pthread_mutex_lock(&tcp->lock);
	/* A sender inside its system call still reads buffers. It does not wait, nor do we long. */
	while (tcp->sending && !tcp->blocked)
		pthread_cond_wait(&tcp->quiet, &tcp->lock);
	tcp->state = TCP_DOWN;
	for (uint32_t i = 0; i < tcp->depth; i++) {
		struct iswi_xfer *xfer = tcp->slot[i].xfer;

		if (xfer == NULL)
			continue;
		iswi_tcp_slot_free(tcp, i);
		*link = xfer;
		link = &xfer->next;
	}
	*link = tcp->pending_first;
	tcp->pending_first = NULL;
	tcp->rx.xfer = NULL;
	pthread_mutex_unlock(&tcp->lock);
	iswi_xfer_end_chain(first, error);
}

static void *receiver_main(void *arg)
{
	struct iswi_tcp *tcp = arg;

	for (;;) {
		bool up, sender, idle, watched, blocked;
		int err;

		pthread_mutex_lock(&tcp->lock);
		up = tcp->state == TCP_UP;
		/* Replies made room for transfers that wait. */
		sender = iswi_tcp_claim_sender(tcp);
		idle = tcp->in_flight == 0 && tcp->pending_first == NULL;
		watched = tcp->watched_ns != 0 &&
			  tcp->watched_ns + TCP_LINGER_MS * NS_PER_MS > tcp->now_ns;
		tcp->dozing = !watched;
		blocked = tcp->blocked;
		pthread_mutex_unlock(&tcp->lock);
		if (!up)
			break;
		if (sender) {
			iswi_tcp_send(tcp, true);
			continue;
		}
		err = receiver_round(tcp, idle, watched, blocked);
		if (err < 0) {
			pthread_mutex_lock(&tcp->lock);
			iswi_tcp_fail(tcp, err);
			pthread_mutex_unlock(&tcp->lock);
		}
	}
	go_down(tcp);
	return NULL;
}

/* ---------------------------------------------------------------- making and freeing */

int iswi_tcp_alloc(uint32_t depth, struct iswi_tcp **tcp_out)
{
	struct iswi_tcp *tcp;

	tcp = calloc(1, sizeof(*tcp));
	if (tcp == NULL)
		return -ENOMEM;
	tcp->slot = calloc(depth, sizeof(*tcp->slot));
	if (tcp->slot == NULL) {
		free(tcp);
		return -ENOMEM;
	}
	tcp->base.ops = &iswi_transport_tcp;
	tcp->depth = depth;
	tcp->fd = -1;
	tcp->wake_fd = -1;
	tcp->clock = &iswi_clock_monotonic;
	for (uint32_t i = 0; i < depth; i++)
		tcp->slot[i].next_free = i + 1 < depth ? i + 1 : TCP_SLOT_NONE;
	pthread_mutex_init(&tcp->lock, NULL);
	pthread_cond_init(&tcp->quiet, NULL);
	*tcp_out = tcp;
	return 0;
}

void iswi_tcp_free(struct iswi_tcp *tcp)
{
	if (tcp->fd >= 0)
		close(tcp->fd);
	if (tcp->wake_fd >= 0)
		close(tcp->wake_fd);
	pthread_cond_destroy(&tcp->quiet);
	pthread_mutex_destroy(&tcp->lock);
	free(tcp->slot);
	free(tcp);
}

/* None of these is needed for right results, so a refusal is not an error. */
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
		return iswi_error(error, err, "no memory for a connection");
	tcp->events = *events;
	tcp->request_ns_max = config->request_ms_max * NS_PER_MS;
	if (config->clock != NULL)
		tcp->clock = config->clock;
	tcp->now_ns = tcp->ticked_ns = tcp->clock->now_ns(tcp->clock->ctx);

	err = iswi_tcp_dial(config, deadline_ns, &tcp->fd, error);
	if (err < 0)
		goto err_free;
	err = iswi_tcp_handshake(tcp->fd, config, deadline_ns, &tcp->remote, error);
	if (err < 0)
		goto err_free;
	tune(tcp->fd, config->request_ms_max);
	tcp->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (tcp->wake_fd < 0) {
		err = iswi_error(error, -errno, "no eventfd: %s", strerror(errno));
		goto err_free;
	}
	err = iswi_thread_start(&tcp->thread,
				config->thread_name != NULL ? config->thread_name : "isw-tcp",
				receiver_main, tcp);
	if (err < 0) {
		iswi_error(error, err, "cannot start a connection's thread: %s", strerror(-err));
		goto err_free;
	}
	*queue_out = &tcp->base;
	return 0;

err_free:
	iswi_tcp_free(tcp);
	return err;
}

static int tcp_connect(const isw_engine *engine, const struct isw_remote_config *config,
		       uint32_t number, const struct iswi_queue_events *events,
		       struct iswi_queue **queue_out, struct isw_error *error)
{
	const struct iswi_tcp_config tcp = {
		.host = config->host,
		.port = config->port,
		.export_name = config->token,
		.export_bytes_min = config->export_bytes,
		.depth = REMOTE_DEPTH,
		.connect_ms_max = config->connect_ms_max,
		.request_ms_max = config->request_ms_max,
		.thread_name = "isw-remote",
	};

	(void)engine;
	(void)number; /* they are all alike */
	return iswi_tcp_connect(&tcp, events, queue_out, error);
}

const struct iswi_transport_ops iswi_transport_tcp = {
	.name = "tcp",
	.kind = ISW_TRANSPORT_TCP,
	.connect = tcp_connect,
	.submit = tcp_submit,
	.shutdown = tcp_shutdown,
	.destroy = tcp_destroy,
};
