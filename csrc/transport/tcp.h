/* SPDX-License-Identifier: Apache-2.0 */
/* The TCP transport: a queue is one connection that speaks the NBD protocol. */
#ifndef ISWI_TRANSPORT_TCP_H
#define ISWI_TRANSPORT_TCP_H

#include "transport/transport.h"

extern const struct iswi_transport_ops iswi_transport_tcp;

struct iswi_tcp_config {
	const char *host;
	uint16_t port;
	const char *export_name;
	uint64_t export_bytes_min;   /* a smaller export is refused ... */
	uint32_t transfer_bytes_max; /* ... and one that takes no request of this length */
	uint32_t depth;              /* requests on the wire at once; further ones wait in order */
	uint32_t connect_ms_max;     /* whole of connect and handshake */
	uint32_t request_ms_max;     /* per request, from submit */
	const char *thread_name;
	const struct iswi_clock *clock; /* for request_ms_max; borrowed; NULL: monotonic */
};

#define ISWI_TCP_DEPTH_MAX 4096

/*
 * Connects, shakes hands (NBD fixed newstyle, GO), starts the receiver thread. Blocking, for
 * connect_ms_max at most (looking up a host's name may add the resolver's own limit). config and
 * its strings are borrowed until it returns, *events is copied. Errors, apart from those of
 * connect(2):
 *
 *   -ENXIO         the host's name cannot be resolved
 *   -ECONNREFUSED  nothing listens there
 *   -ETIMEDOUT     no answer, or none that is NBD, within connect_ms_max
 *   -ECONNRESET    closed by the other side during the handshake
 *   -EPROTO        not an NBD server of this kind: another protocol on that port
 *   -ENOENT        no such export: the ticket is wrong, used, late or of an older epoch
 *   -EACCES        the server wants TLS, or forbids it by policy
 *   -ERANGE        the export is smaller than export_bytes_min
 *   -EROFS         the export is read-only
 *   -EOPNOTSUPP    the server cannot do what is needed (GO, 4 KiB blocks, our largest transfers)
 *   -EINVAL        a mistake in config
 */
int iswi_tcp_connect(const struct iswi_tcp_config *config, const struct iswi_queue_events *events,
		     struct iswi_queue **queue_out, struct isw_error *error);

#endif
