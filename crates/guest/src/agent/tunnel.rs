//! `GET /tunnel?port=N`: a raw byte stream to a port on the guest's loopback, for the host's proxy. This is how services
//! that listen on 127.0.0.1 only are reached from outside.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use axum::{
    body::Body,
    extract::Request,
    response::{IntoResponse, Response},
};
use http::{
    header::{CONNECTION, UPGRADE},
    HeaderValue, StatusCode,
};
use hyper_util::rt::TokioIo;
use tokio::{io::copy_bidirectional_with_sizes, net::TcpStream, time::timeout};

use super::error::HttpError;

const PROTOCOL: &str = "aenv-tunnel";
/// A listener whose backlog is full does not answer at all.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const BUFFER: usize = 32 << 10;

/// Connects to the port, answers 101 and copies both ways until both sides have closed. 400 for a bad port, 426 without
/// the upgrade, 502 when nothing listens.
pub async fn handler(request: Request) -> Response {
    match open(request).await {
        Ok(response) => response,
        Err(error) => error.into_response(),
    }
}

async fn open(mut request: Request) -> Result<Response, HttpError> {
    let port = port(request.uri().query().unwrap_or_default()).ok_or_else(|| {
        HttpError::new(
            StatusCode::BAD_REQUEST,
            "port must be a number from 1 to 65535",
        )
    })?;
    let wants_upgrade = request
        .headers()
        .get(UPGRADE)
        .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(PROTOCOL.as_bytes()));
    if !wants_upgrade {
        return Err(HttpError::new(
            StatusCode::UPGRADE_REQUIRED,
            format!("the request must ask for an upgrade to {PROTOCOL}"),
        ));
    }
    let mut service = connect(port).await.map_err(|error| {
        HttpError::new(
            StatusCode::BAD_GATEWAY,
            format!("port {port} is not open: {error}"),
        )
    })?;
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        // Either side breaking off is how tunnels normally end.
        if let Ok(client) = upgrade.await {
            let _ = copy_bidirectional_with_sizes(
                &mut TokioIo::new(client),
                &mut service,
                BUFFER,
                BUFFER,
            )
            .await;
        }
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static(PROTOCOL));
    Ok(response)
}

fn port(query: &str) -> Option<u16> {
    query
        .split('&')
        .find_map(|pair| pair.strip_prefix("port="))
        .and_then(|value| value.parse().ok())
        .filter(|port| *port != 0)
}

async fn connect(port: u16) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::ConnectionRefused);
    for address in [
        SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
        SocketAddr::from((Ipv6Addr::LOCALHOST, port)),
    ] {
        match timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            // The first refusal says more than a missing IPv6.
            Ok(Err(error)) if address.is_ipv4() => last = error,
            Ok(Err(_)) => {}
            Err(_) => last = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::port;

    #[test]
    fn only_real_ports_are_taken() {
        assert_eq!(port("x=1&port=8080"), Some(8080));
        for bad in [
            "",
            "port=",
            "port=0",
            "port=65536",
            "port=-1",
            "port=a",
            "ports=1",
        ] {
            assert_eq!(port(bad), None, "{bad:?}");
        }
    }
}
